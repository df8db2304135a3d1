"""``everstep history`` shows, compares and forgets jobs; every job leaves a record, or one line why it could not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep.cli.main import cli
from everstep.cli.remembered_job import SeenJob, remember_job
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.job_view import JobView, MemberView, ShownState
from everstep.model.member import Role
from everstep.monitor.job_history import JobHistory

SUMMARY = {
    "phase": "done",
    "exit_code": 0,
    "samples_done": 3000,
    "epochs": 3,
    "wall_s": 4.0,
    "samples_per_s": 750.0,
    "failures": {"worker": 1, "ps": 0},
    "values": {"secret_name": 1.0},
    "model": {"files": {"dense.safetensors": 70, "tables/a.safetensors": 30}},
}


def view(at: float, samples: int, rss: int, peak: int = 0) -> JobView:
    member = MemberView(
        Role.WORKER, Slot(0), Incarnation(1), NodeId("n"), 1, ShownState.ALIVE, rss_bytes=rss, peak_bytes=peak
    )
    return JobView(
        job="j",
        phase="training",
        at=at,
        started_at=0.0,
        master_incarnation=Incarnation(1),
        members=(member,),
        samples_done=samples,
        samples_per_s=0.0,
        epochs=(),
        batches_retried=0,
        failures={},
        reported={},
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path / "run"


@pytest.fixture
def file(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of two jobs."""
    path = tmp_path / "history.sqlite"
    monkeypatch.setenv("EVERSTEP_HISTORY", str(path))
    (tmp_path / "train.py").write_text("SECRET = 'in the code'")
    spec = JobSpec(name="flights", script=str(tmp_path / "train.py"), args=("--password", "hidden"), workers=2)
    seen = SeenJob()
    for at, samples, rss in ((1.0, 0, 5 << 20), (2.0, 500, 9 << 20), (4.0, 2500, 7 << 20), (9.0, 2500, 7 << 20)):
        seen.see(view(at, samples, rss, peak=11 << 20 if at == 4.0 else 0))
    assert remember_job(spec, run_dir, seen) == ""
    assert remember_job(spec, run_dir, SeenJob()) == ""
    return path


def run(*words: str) -> str:
    done = CliRunner().invoke(cli, ["history", *words], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_a_job_is_remembered_by_names_and_numbers(file: Path) -> None:
    first, second = (k.job for k in JobHistory(file).jobs())
    assert (first.samples_per_s, first.training_s, first.worker_peak_bytes) == (1000.0, 2.0, 11 << 20)
    assert (second.samples_per_s, second.training_s) == (750.0, 0.0), "too short to be seen: as the summary says"
    assert (first.samples, first.epochs, first.model_bytes, first.failures["worker"]) == (3000, 3, 100, 1)
    kept = b"".join(p.read_bytes() for p in file.parent.glob("history.sqlite*"))
    for secret in (b"in the code", b"hidden", b"password", b"secret_name"):
        assert secret not in kept


def test_the_last_beat_of_a_worker_counts(file: Path, run_dir: Path) -> None:
    """It comes after the model was written, when nobody looks at the job any more."""
    (run_dir / "summary.json").write_text(json.dumps({**SUMMARY, "peaks": {"worker": 30 << 20, "ps": 5 << 20}}))
    seen = SeenJob()
    seen.see(view(1.0, 0, 7 << 20))
    assert remember_job(JobSpec(name="flights", script=str(file.parent / "train.py")), run_dir, seen) == ""
    last = [k.job for k in JobHistory(file).jobs()][-1]
    assert (last.worker_peak_bytes, last.ps_peak_bytes) == (30 << 20, 5 << 20)


def test_list_show_and_json(file: Path) -> None:
    assert "flights" in run() and "1,000" in run("show")
    assert "job 1" in run("show", "1") and "1 worker" in run("show", "1")
    assert [j["number"] for j in json.loads(run("show", "--json"))] == [1, 2]
    assert "(1 older ones: --limit 2)" in run("show", "--limit", "1")


def test_compare(file: Path) -> None:
    lines = {line.split("  ")[0]: line for line in run("compare", "1", "2").splitlines()}
    assert lines["samples/s"].split()[-3:] == ["1,000", "750", "0.75"]


def test_forget(file: Path) -> None:
    with pytest.raises(ConfigError, match="job 9: not in the history"):
        run("forget", "9")
    with pytest.raises(ConfigError, match="give numbers of jobs, or --all"):
        run("forget")
    assert "1 jobs forgotten" in run("forget", "1")
    assert "1 jobs forgotten" in run("forget", "--all")
    assert "no jobs in" in run()


def test_no_history_is_kept(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    monkeypatch.setenv("EVERSTEP_HISTORY", "off")
    with pytest.raises(ConfigError, match="EVERSTEP_HISTORY=off: no history is kept"):
        run()
    assert remember_job(JobSpec(), run_dir, SeenJob()) == ""


def test_a_history_that_cannot_be_used_does_not_end_a_job(tmp_path: Path, run_dir: Path) -> None:
    (tmp_path / "bad").write_bytes(b"nothing" * 1000)
    said = remember_job(JobSpec(), run_dir, SeenJob(), {"EVERSTEP_HISTORY": str(tmp_path / "bad")})
    assert said.startswith("history ") and said.endswith("this job is not remembered") and "\n" not in said


def test_without_history_no_run_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_HISTORY", str(tmp_path / "none"))
    (tmp_path / "train.py").write_text("raise SystemExit('it may not run')")
    done = CliRunner().invoke(cli, ["estimate", "--no-run", str(tmp_path / "train.py")], standalone_mode=False)
    assert isinstance(done.exception, ConfigError)
    assert "run it once with everstep run, or leave --no-run out" in str(done.exception)


def test_no_run_uses_the_history(file: Path, tmp_path: Path) -> None:
    words = ["estimate", "--no-run", "--workers", "2", "--ps", "1", str(tmp_path / "train.py")]
    done = CliRunner().invoke(cli, [*words, "--password", "hidden"], standalone_mode=False)
    assert done.exception is None, done.exception
    assert "history: from job 2 (the same script, arguments and machine; 2 workers, 1 ps)" in done.output
    assert "750 samples/s" in done.output
