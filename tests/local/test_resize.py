"""``everstep resize`` and sizes of processes, in real jobs: the kernel's limits are those that were asked for."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
from local_jobs import Run

from everstep.cli.auto_size import with_sizes
from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

MB = 1 << 20


def test_processes_that_start_next_have_the_size_that_was_asked_for(run: Run) -> None:
    run.write(epochs=9)
    run.start("--workers", "1", "--ps", "2", "--parity", "1+1", "--ps-memory", "600MiB")
    run.trained(200)
    first, worker = run.alive(Role.PS, 1), run.alive(Role.WORKER, 0)
    assert resource.prlimit(first.pid, resource.RLIMIT_DATA)[0] == 600 * MB
    code, out = run.everstep(
        "resize", str(run.run_dir), "--ps-memory", "700MiB", "--ps-threads", "1", "--worker-memory", "3GiB"
    )
    assert code == 0 and "from its next start on" in out, out
    code, out = run.everstep("resize", str(run.run_dir), "--ps-memory", "900000GB")
    assert code != 0 and out.count("\n") == 1 and "for each ps: node0 has" in out, out
    code, out = run.everstep("status", str(run.run_dir))
    assert "each new process gets: ps 700.0 MiB, 1 thread; worker 3.0 GiB" in out, out
    assert resource.prlimit(first.pid, resource.RLIMIT_DATA)[0] == 600 * MB, "those that run keep what they have"
    for role, slot, pid in ((Role.PS, 1, first.pid), (Role.WORKER, 0, worker.pid)):
        os.kill(pid, signal.SIGKILL)
        run.alive(role, slot, at_least=2)
    second, worker = run.alive(Role.PS, 1, at_least=2), run.alive(Role.WORKER, 0, at_least=2)
    assert resource.prlimit(second.pid, resource.RLIMIT_DATA)[0] == 700 * MB
    assert len(os.sched_getaffinity(second.pid)) == 1
    assert resource.prlimit(worker.pid, resource.RLIMIT_DATA)[0] == 3 << 30
    run.hurry()
    run.ended_well()
    code, out = run.everstep("explain", str(run.run_dir))
    assert "each ps that starts from now on gets 700.0 MiB, 1 thread instead of 600.0 MiB" in out, out
    assert run.everstep("replay", str(run.run_dir))[0] == 0


GROWING = Path(__file__).resolve().parents[2] / "benchmarks" / "_growing_script.py"


GROWS = (
    "--workers",
    "1",
    "--ps",
    "2",
    "--parity",
    "1+1",
    "--ps-memory",
    "200MiB",
    "--model-to",
    "none",
    "--no-display",
)


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            (),
            "it has almost reached the limit of its process (200.0 MiB): each ps that starts from now on gets ",
        ),
        (
            ("--policy", "memory", "--max-ps", "2", "--max-memory", "8GB"),
            "there may be no more than 2 ps, so each ps gets ",
        ),
    ],
    ids=["static", "memory"],
)
def test_no_ps_dies_where_all_are_equally_full(
    run: Run, flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables outgrow the limit of both ps, by half again: without more memory both die within the same batch."""
    monkeypatch.setenv("EVERSTEP_WINDOW_S", "1")
    run.script.write_text(GROWING.read_text())
    run.start(*GROWS, *flags, args=("60000", "300", "0.05"))
    pids = [run.alive(Role.PS, slot).pid for slot in range(2)]
    run.ended_well(400.0)
    assert run.text().count(words) >= 1, run.story()
    summary = json.loads((run.run_dir / "summary.json").read_bytes())
    assert summary["failures"]["ps"] == 0 and summary["sizes"]["ps"][1] > 250 * MB, summary
    lines = [json.loads(line) for line in (run.run_dir / "members.jsonl").read_text().splitlines()]
    used = [max(line["limit_used_bytes"] for line in lines if line["member"] == f"ps:{slot}") for slot in range(2)]
    assert min(used) > 200 * MB, f"with 200 MiB each would have died: {used}, {pids}"
    assert run.everstep("replay", str(run.run_dir))[0] == 0


@pytest.mark.slow
@pytest.mark.cold
def test_a_ps_that_died_of_its_limit_comes_back_with_more_and_the_history_knows_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of one ps cannot be raised while it runs: its hard limit is no higher."""
    monkeypatch.setenv("EVERSTEP_HISTORY", str(tmp_path / "history.sqlite"))
    run.script.write_text(GROWING.read_text())
    size = ("50000", "300", "0.05")
    run.start(*GROWS, args=size)
    pid = run.alive(Role.PS, 1).pid
    resource.prlimit(pid, resource.RLIMIT_DATA, (200 * MB, 200 * MB))
    run.ended_well(400.0)
    assert run.text().count("ps:1 more memory: it had 200.0 MiB; the next one gets 400.0 MiB") == 1, run.story()
    assert "1 ps (1 out of memory)" in run.text()
    _, out = run.everstep("history", "show", "--json")
    (job,) = json.loads(out)
    assert job["too_small"]["ps"] >= 200 * MB and job["memory"] == {"ps": 400 * MB}, out
    monkeypatch.chdir(tmp_path)
    found, said = with_sizes(
        {"script": str(run.script), "args": size, "workers": 1, "ps": "auto", "max_ps": 8, "ps_memory": "200MiB"}
    )
    assert found["ps"] >= 4 and "a ps died of" in said, said
