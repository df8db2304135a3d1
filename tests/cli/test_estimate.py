"""``everstep estimate`` measures a script in real processes, and says in one line what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from everstep.cli.estimate import EstimateFlags, probed_sizes, wishes_of
from everstep.cli.main import cli
from everstep.cli.probe_job import ProbeAsk, declared_mode, run_probe
from everstep.errors import ConfigError, PlatformError, ScriptError
from everstep.sizing.size_choice import Wishes

SCRIPT = """
import numpy as np, torch
from torch import nn
import everstep as es

rng = np.random.default_rng(0)
data = {"id": rng.integers(0, 5000, (20000, 2)), "y": rng.random(20000, np.float32)}
job = es.join()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = es.nn.Embedding("ids", 4), nn.Linear(8, 1)
    def forward(self, b):
        return self.out(self.rows(b["id"]).flatten(1)).squeeze(1)
model = job.replicate(job.sparse(Model()))
opt = job.optimizer(torch.optim.Adam(model.parameters()))
for batch in job.steps(job.loader(data, 500, epochs=3)):
    loss = (model(batch) - batch["y"]).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
raise SystemExit("nothing behind the loop may run")
"""


@pytest.mark.parametrize(
    ("wishes", "cores", "sizes"),
    [
        (Wishes(), 2, [(1, 1), (2, 2)]),
        (Wishes(), 1, [(1, 1)]),
        (Wishes(workers=1), 8, [(1, 1)]),
        (Wishes(workers=1, ps=1), 8, [(1, 1)]),
        (Wishes(workers=1, ps=3), 2, [(1, 1), (1, 3)]),
        (Wishes(workers=2, ps=1), 2, [(1, 1), (2, 1)]),
        (Wishes(workers=20, ps=16), 8, [(1, 1), (2, 4)]),
        (Wishes(mode="allreduce", ps=0), 2, [(1, 0), (2, 0)]),
        (Wishes(mode="allreduce", workers=1, ps=0), 2, [(1, 0)]),
        (Wishes(mode="allreduce", workers=2, ps=3), 2, [(1, 1), (2, 3)]),
        (Wishes(mode="allreduce", ps=-1), 2, [(1, 0), (2, 0)]),
    ],
)
def test_the_size_that_was_asked_for_is_probed(wishes: Wishes, cores: int, sizes: list[tuple[int, int]]) -> None:
    assert probed_sizes(wishes, cores) == sizes


def ask(script: Path, **more: object) -> ProbeAsk:
    base = ProbeAsk(script, (), (), 1, 1, 2, 0.3, 30.0, 120.0)
    return base._replace(**more)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_script_is_measured_at_its_loop(script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = run_probe(ask(script))
    reading = found.script
    assert (reading.samples, reading.epochs, reading.batch) == (20000, 3, 500)
    assert reading.parameters == 9
    rows = {t.name: t for t in reading.tables}
    import numpy as np

    truth = len(np.unique(np.random.default_rng(0).integers(0, 5000, (20000, 2))))
    assert rows["ids"].keys.likely == truth and rows["ids"].keys.whole
    assert (rows["ids"].dim, rows["ids"].state) == (4, 9), "of Adam, which holds its weight"
    assert 0 < rows["ids"].probed <= truth
    assert found.samples_per_s > 0 and found.worker_peak_bytes > found.ps_peak_bytes > 1 << 20
    assert reading.activation_bytes > 0 and reading.bytes_out > 0 and reading.read_samples_per_s > 0
    assert not list(tmp_path.glob("everstep-estimate-*")), "nothing is left"
    assert not (tmp_path / "runs").exists()


GROWING = SCRIPT.replace("integers(0, 5000, (20000, 2))", "integers(0, 1 << 40, (3_000_000, 2))").replace(
    "rng.random(20000", "rng.random(3_000_000"
)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_table_that_grows_is_probed_over_rows_that_are_there_too(tmp_path: Path) -> None:
    """Each key is new, so that the only rows that come again are those of samples that come again."""
    path = tmp_path / "train.py"
    path.write_text(GROWING)
    assert GROWING.count("3_000_000") == 2
    fresh = run_probe(ask(path, scan_s=0.0, window_s=4.0))
    known = run_probe(ask(path, scan_s=0.0, window_s=4.0, first=20_000))
    assert known.rows == pytest.approx(40_000, abs=2), "all were there, and no others came"
    assert fresh.rows_per_sample > 1.0, "each sample makes two"
    assert known.rows_per_sample < fresh.rows_per_sample, "(beats tell of rows up to a second late)"
    assert known.script.samples == 20_000


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_script_that_ends_before_its_loop(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import everstep as es\njob = es.join()\nraise ValueError('no data today')\n")
    with pytest.raises(ScriptError, match=r"ended before its loop was measured: .*no data today"):
        run_probe(ask(path))


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_script_that_does_not_get_to_its_loop(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(PlatformError, match=r"no loop was measured within 0.5 s: give it longer with --limit"):
        run_probe(ask(path, limit_s=0.5))


def test_the_mode_is_read_from_the_script(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import everstep as es\njob = es.join(seed=1, mode='allreduce')\n")
    assert declared_mode(path) == "allreduce"
    path.write_text("job = es.join(mode=words[0])\n")
    assert declared_mode(path) == ""
    path.write_text("def broken(:\n")
    assert declared_mode(path) == ""


def test_what_is_wished_for() -> None:
    assert wishes_of(EstimateFlags(), "allreduce").mode == "allreduce"
    assert wishes_of(EstimateFlags(), "allreduce").ps == 0
    assert wishes_of(EstimateFlags(ps=2, mode="allreduce"), "").has_ps
    assert wishes_of(EstimateFlags(memory="2GB"), "").memory_bytes == 2e9
    assert wishes_of(EstimateFlags(deadline="2h"), "").deadline_s == 7200.0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (EstimateFlags(mode="both"), "--mode both: must be one of ps, allreduce, pipeline"),
        (EstimateFlags(parity="4"), "--parity 4: expected K\\+M"),
        (EstimateFlags(stages=2), "--stages 2 in mode ps"),
        (EstimateFlags(memory="much"), "size 'much' is not a number"),
        (EstimateFlags(deadline="soon"), "time span 'soon' is not a number"),
        (EstimateFlags(workers=9, max_workers=2), "exclude each other"),
    ],
)
def test_wrong_words(asked: EstimateFlags, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wishes_of(asked, "")


def test_no_script() -> None:
    result = CliRunner().invoke(cli, ["estimate"], standalone_mode=False)
    assert isinstance(result.exception, ConfigError) and "everstep estimate train.py" in str(result.exception)


def test_a_reading_travels(tmp_path: Path) -> None:
    from everstep.sizing.probe_readings import ScriptReading, TableReading

    reading = ScriptReading(1, 2, 3, 4, 0.0, 1.0, 5, 6, tables=(TableReading("a", 1, 2),))
    assert msgspec.json.Decoder(ScriptReading).decode(msgspec.json.encode(reading)) == reading
