"""``everstep advise --measure``: the kernels run, and what cannot be measured is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep.cli.advise import MeasureFlags, measure, measured_lines
from everstep.cli.kernel_probe import ProbeLoad, probe_kernels
from everstep.cli.main import cli
from everstep.errors import ConfigError
from everstep.policies.advise import Case

CASE = Case(table_bytes=1e9, bandwidth=1e9, mtbf_s=3600.0, ps=8)


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.cli.kernel_probe.MOST_ROWS", 20_000)
    monkeypatch.setattr("everstep.cli.kernel_probe.COLD_BYTES", 1 << 10)
    monkeypatch.setattr("everstep.cli.kernel_probe.TOTAL_S", 0.0)


def test_every_piece_is_measured(tmp_path: Path) -> None:
    found = probe_kernels(ProbeLoad(dim=8, rows=2000, pushes=3), tmp_path, total_s=0.0)
    assert found.acked.push_s == found.lag.push_s > 0
    for costs in (found.acked, found.lag):
        assert costs.send_s > 0 and costs.apply_s > 0 and costs.protect_s > 0
    assert found.lag_pushes == 3
    assert 1 / 3 <= found.distinct < 1, "the hot rows are in each push, and cost once"
    assert found.write_bytes_per_s > 0 and found.write_cpu_s_per_byte > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_the_table_is_about_this_machine(tmp_path: Path) -> None:
    flags = MeasureFlags(0.1, 2000, 8, 2, tmp_path, frozenset({"bandwidth"}))
    said: list[str] = []
    case, costs = measure(CASE._replace(lag_s=0.3), flags, said.append)
    assert said and case.bandwidth == CASE.bandwidth
    assert 0 < case.parity < 1 and case.parity != CASE.parity and case.lag != CASE.lag
    text = "\n".join(measured_lines(case, costs, flags))
    assert "binds" in text and "--bandwidth" in text and str(tmp_path) in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (MeasureFlags(0.0, 10, 8, 2, Path()), "--measure needs --step"),
        (MeasureFlags(0.1, 0, 8, 2, Path()), "--rows-per-step 0: must be from 1"),
        (MeasureFlags(0.1, 10, 5000, 2, Path()), "--dim 5000: must be from 1 to 4096"),
        (MeasureFlags(0.1, 10, 8, 0, Path()), "--cores 0"),
        (MeasureFlags(0.1, 19_000, 8, 2, Path()), "--rows-per-step 19000: at dim 8 .* at most 5000"),
        (MeasureFlags(0.1, 10, 8, 2, Path("/nowhere/at/all")), "--write-to /nowhere/at/all: cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_named(flags: MeasureFlags, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        measure(CASE, flags, lambda line: None)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "no --bandwidth"),
        (["--bandwidth", "1GB", "--lag", "0s"], "--lag 0s: must be from 0.05 s to 3600 s"),
        (["--bandwidth", "1GB", "--lag", "soon"], "time span 'soon'"),
        (["--bandwidth", "1GB", "--lag-costs", "2"], "--lag-costs 2: a share"),
        (["--measure"], "--measure needs --step"),
    ],
)
def test_flags_that_cannot_be(more: list[str], says: str) -> None:
    done = CliRunner().invoke(cli, ["advise", "--tables", "1GB", "--mtbf", "8h", *more])
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError) and says in str(done.exception)


def test_programs_read_what_was_measured(tmp_path: Path) -> None:
    flags = ["--measure", "--step", "100ms", "--rows-per-step", "2000", "--dim", "8", "--lag", "200ms"]
    done = CliRunner().invoke(
        cli, ["advise", "--tables", "1GB", "--mtbf", "8h", *flags, "--write-to", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["measured"]["lag_pushes"] == 2 and told["case"]["bandwidth"] == told["measured"]["write_bytes_per_s"]
    assert {o["name"] for o in told["options"]} >= {"parity 4+1", "parity 4+1 lag 0.2s"}
    assert all(o["binds"] in o["parts"] for o in told["options"])
