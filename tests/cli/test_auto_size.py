"""``everstep run --workers auto --ps auto``: where a job begins, and bounds that exclude each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from everstep.cli.auto_size import with_sizes
from everstep.cli.counts import CountOrAuto
from everstep.cli.main import cli
from everstep.config.load import load_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.monitor.job_history import JobHistory, args_digest, script_digest
from everstep.monitor.process_readings import hardware_class
from everstep.sizing.past_jobs import PastJob


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import everstep as es\njob = es.join()\n")
    return path


def flags(script: Path, **more: Any) -> dict[str, Any]:
    return {"script": str(script), "args": (), "workers": "auto", "ps": "auto", **more}


def test_without_history_it_begins_with_one_of_each(script: Path) -> None:
    found, said = with_sizes(flags(script, max_workers=8))
    assert (found["workers"], found["ps"], found["policy"]) == (1, 1, "auto")
    assert (found["max_workers"], found["max_ps"]) == (8, 4)
    assert said == "auto: begins with 1 workers and 1 ps (no earlier job says more); --max-workers 8, --max-ps 4"
    assert load_spec(None, found, {})[0].policy == "auto"


def test_parity_and_bounds_are_kept(script: Path) -> None:
    found, _ = with_sizes(flags(script, parity="4+1", min_workers=3, max_workers=8))
    assert (found["workers"], found["ps"], found["max_ps"]) == (3, 5, 5)
    found, said = with_sizes({"workers": "auto", "ps": 2, "policy": "shared"})
    assert (found["ps"], found["max_ps"], found["policy"]) == (2, 4, "auto+shared") and "ps (" not in said
    found, _ = with_sizes({"workers": "auto", "mode": "allreduce", "script": str(script)})
    assert "max_ps" not in found and found["max_workers"] == os.cpu_count()


def test_a_number_that_was_given_stays_unless_it_has_a_bound(script: Path) -> None:
    assert "sizes" not in with_sizes(flags(script))[0]
    assert with_sizes({"workers": "auto", "ps": 2})[0]["sizes"] == "workers"
    assert with_sizes({"workers": 2, "ps": "auto"})[0]["sizes"] == "ps"
    assert "sizes" not in with_sizes({"workers": "auto", "ps": 2, "max_ps": 4})[0]
    assert with_sizes({"workers": "auto", "ps": 2, "max_ps": 4, "sizes": "workers"})[0]["sizes"] == "workers"
    assert "sizes" not in with_sizes({"workers": "auto", "mode": "allreduce", "script": str(script)})[0]
    assert load_spec(None, with_sizes(flags(script, workers=2))[0], {})[0].sizes == "ps"


def test_nothing_is_auto(script: Path) -> None:
    plain = {"script": str(script), "workers": 2}
    assert with_sizes(plain) == (plain, "")


def test_it_begins_with_what_earlier_jobs_call_for(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HISTORY", str(tmp_path / "h.sqlite"))
    history = JobHistory(tmp_path / "h.sqlite")
    for workers, rate in ((1, 1000.0), (3, 2900.0)):
        history.add(
            PastJob(
                at=1.0 + workers, name="train", script="train.py", script_id=script_digest(script),
                args_id=args_digest(()), mode="ps", workers=workers, ps=1, hardware=hardware_class(), cores=8,
                phase="done", samples=10**6, wall_s=100.0, training_s=90.0, samples_per_s=rate,
                worker_peak_bytes=1 << 20, ps_peak_bytes=1 << 20,
            )
        )  # fmt: skip
    found, said = with_sizes(flags(script, max_workers=3, max_ps=2))
    assert (found["workers"], found["ps"]) == (3, 1)
    assert "by the history: job 2, job 1" in said
    assert with_sizes(flags(script, max_workers=2, max_ps=2))[0]["workers"] == 2


def died_of_256_mib(history: Path, script: Path, **more: Any) -> None:
    """Remember a job of the script in which a ps died of 256 MiB."""
    of = {"script_id": script_digest(script), "args_id": args_digest(())}
    job = PastJob(1.0, "train", "train.py", **of, mode="ps", workers=1, too_small={"ps": 256 << 20}, **more)
    JobHistory(history).add(job)


def test_it_begins_with_more_ps_than_those_that_died_of_their_memory(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HISTORY", str(tmp_path / "h.sqlite"))
    died_of_256_mib(tmp_path / "h.sqlite", script, ps=1, phase="failed", exit_code=4)
    found, said = with_sizes(flags(script, max_ps=8))
    assert found["ps"] == 2 and "(by the history: job 1: a ps died of 256.0 MiB of memory (1 ps))" in said
    assert with_sizes(flags(script, max_ps=8, ps_memory="128MiB"))[0]["ps"] == 4
    assert with_sizes(flags(script, max_ps=8, ps_memory="1GiB"))[0]["ps"] == 1
    assert with_sizes(flags(script, max_ps=3, ps_memory="128MiB"))[0]["ps"] == 3, "within its bounds"


def test_a_job_of_another_parity_that_ended_well_teaches_its_memory_too(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No size follows from it for this parity; that its ps died once of 256 MiB does."""
    monkeypatch.setenv("EVERSTEP_HISTORY", str(tmp_path / "h.sqlite"))
    well = {"phase": "done", "samples": 100, "training_s": 1.0, "samples_per_s": 100.0}
    died_of_256_mib(tmp_path / "h.sqlite", script, ps=2, parity="1+1", memory={"ps": 512 << 20}, **well)
    found, said = with_sizes(flags(script, max_ps=8, ps_memory="256MiB"))
    assert found["ps"] == 4 and "(by the history: job 1: a ps died of 256.0 MiB of memory (2 ps)" in said


def test_a_history_that_cannot_be_used_is_said(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h.sqlite").write_bytes(b"no database at all" * 100)
    monkeypatch.setenv("EVERSTEP_HISTORY", str(tmp_path / "h.sqlite"))
    found, said = with_sizes(flags(script))
    assert (found["workers"], found["ps"]) == (1, 1) and "cannot be used" in said and "\n" not in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"min_workers": 5, "max_workers": 4}, "--min-workers 5 and --max-workers 4: exclude each other"),
        ({"max_ps": 1, "parity": "2+1"}, "--max-ps 1: parity 2+1 needs at least 3 ps"),
        (
            {"max_workers": 1, "max_ps": 1},
            "--workers auto: --max-workers 1 leaves nothing to choose; give a larger one",
        ),
        ({"ps": 0, "mode": "allreduce", "min_workers": 3, "max_workers": 3}, "--workers auto: --max-workers 3 leaves"),
        ({"workers": 2, "max_ps": 2, "parity": "1+1"}, "--ps auto: --max-ps 2 leaves nothing to choose"),
        ({"mode": "pipeline"}, "--ps auto in mode pipeline: a model in stages has no ps"),
    ],
)
def test_bounds_that_exclude_each_other(script: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="^" + words.replace("+", r"\+")):
        with_sizes(flags(script, **more))


JOB = """script: {script}
workers: auto
ps: auto
max_workers: 8
parity: 1+1
max_memory: 4GB
optimize: waste
"""


def loaded(
    text: str, tmp_path: Path, flags: dict[str, Any], env: dict[str, str]
) -> tuple[JobSpec, dict[str, str], str]:
    (tmp_path / "job.yaml").write_text(text)
    said: list[str] = []

    def sizes(values: dict[str, Any]) -> dict[str, Any]:
        found, note = with_sizes(values)
        said.append(note)
        return found

    spec, origins = load_spec(tmp_path / "job.yaml", flags, env, sizes=sizes)
    return spec, origins, "".join(said)


def test_auto_in_job_yaml_is_auto_as_a_flag(script: Path, tmp_path: Path) -> None:
    spec, origins, said = loaded(JOB.format(script=script), tmp_path, {}, {})
    flagged, note = with_sizes(flags(script, max_workers=8, parity="1+1"))
    assert (
        said == note == "auto: begins with 1 workers and 2 ps (no earlier job says more); --max-workers 8, --max-ps 4"
    )
    assert (spec.workers, spec.ps, spec.policy, spec.max_ps) == (1, 2, "auto", flagged["max_ps"])
    assert (spec.optimize, spec.max_memory) == ("waste", "4GB")
    assert origins["ps"] == origins["policy"] == origins["max_ps"] == "auto"
    assert origins["max_workers"].endswith("job.yaml line 4")


def test_flags_win_over_job_yaml_and_environment(script: Path, tmp_path: Path) -> None:
    text = JOB.format(script=script)
    assert loaded(text, tmp_path, {"workers": 2}, {})[0].workers == 2
    fixed = loaded(
        text.replace("optimize: waste\n", "").replace("max_memory: 4GB\n", ""), tmp_path, {"workers": 2, "ps": 3}, {}
    )
    assert (fixed[0].policy, fixed[2]) == ("none", "")
    spec, origins, said = loaded("max_workers: 3\n", tmp_path, {"script": str(script)}, {"EVERSTEP_WORKERS": "auto"})
    assert (spec.workers, spec.ps, spec.max_workers, origins["max_workers"][-6:]) == (1, 1, 3, "line 1")
    assert said.startswith("auto: begins with 1 workers (")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("max_workers: 8", "max_ps: 1"), r"^--max-ps 1: parity 1\+1 needs at least 2 ps$"),
        (
            ("max_workers: 8", "min_workers: 5\nmax_workers: 4"),
            "^--min-workers 5 and --max-workers 4: exclude each other$",
        ),
        (("workers: auto", "workers: many"), "line 2: workers = 'many': expected a whole number$"),
        (("4GB", "much"), r"max_memory = 'much' \(.*line 6\): expected a size such as '16GB' "),
        (("4GB", "'4'"), "max_memory = '4' .*: must be from 1MiB to"),
        (("auto\nps: auto", "2\nps: 2"), "max_memory = '4GB' .*|optimize = 'waste' .*: needs policy: auto"),
    ],
)
def test_a_wrong_job_yaml_is_one_line(script: Path, tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        loaded(JOB.format(script=script).replace(*change, 1), tmp_path, {}, {})
    assert "\n" not in str(refused.value)


def test_who_cannot_find_a_size_refuses_auto(script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(script=script))
    words = r"^workers = 'auto' .*line 2\): only everstep run finds a size; give a number$"
    with pytest.raises(ConfigError, match=words):
        load_spec(tmp_path / "job.yaml", {}, {})


def test_a_count_is_a_number_or_auto() -> None:
    assert CountOrAuto().convert("3", None, None) == 3 and CountOrAuto().convert("auto", None, None) == "auto"
    with pytest.raises(click.BadParameter, match="not a valid integer"):
        CountOrAuto().convert("many", None, None)
    done = CliRunner().invoke(cli, ["run", "--workers", "many", "train.py"])
    assert done.exit_code == 2 and "many" in done.output
