"""``everstep resize`` and sizes of processes, in real jobs: the kernel's limits are those that were asked for."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
from local_jobs import Run

from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

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
    code, out = run.everstep("resize", str(run.run_dir), "--ps-memory", "900TB")
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


@pytest.mark.slow
def test_a_ps_that_died_of_its_limit_comes_back_with_more_and_the_history_knows(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ps is given less than it has, so that its next allocations fail: the kernel's own refusal."""
    history = tmp_path / "history.sqlite"
    monkeypatch.setenv("EVERSTEP_HISTORY", str(history))
    run.write(epochs=9)
    run.start("--workers", "1", "--ps", "2", "--parity", "1+1")
    run.trained(200)
    first = run.alive(Role.PS, 1)
    hard = resource.prlimit(first.pid, resource.RLIMIT_DATA)[1]
    resource.prlimit(first.pid, resource.RLIMIT_DATA, (40 * MB, hard))
    second = run.alive(Role.PS, 1, at_least=2)
    assert resource.prlimit(second.pid, resource.RLIMIT_DATA)[0] == 128 * MB
    run.hurry()
    run.ended_well()
    assert "ps:1 more memory: it died of 40.0 MiB" in run.text(), run.story()
    code, out = run.everstep("history", "show", "--json")
    (job,) = json.loads(out)
    assert job["too_small"] == {"ps": 40 * MB} and job["memory"] == {"ps": 128 * MB}, out
    code, out = run.everstep("estimate", "--no-run", "--workers", "1", "--ps", "2", "--parity", "1+1", str(run.script))
    assert code == 0 and "a ps died of 40.0 MiB of memory (2 ps), and came to its end with 128.0 MiB" in out, out
