"""A pipeline's only replica is lost with its machine: it goes on from the copy that the neighbour's agent keeps."""

from __future__ import annotations

import re

import pytest
import torch
from local_jobs import until
from node_jobs import join
from test_pipeline import PipelineRun, alone

from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(390)]

RUN = PipelineRun

LOSE = """if life == 1 and job.slot == 0 and job.process_index == 0 and job.step >= 25 and os.path.exists("lose"):
        kept = job._trainer.engine.copies._page.common_kept
        if kept >= job.step - 1:
            os.kill(int(open("lose").read()), 9)
            time.sleep(60)"""


def begin(run: PipelineRun, *flags: str) -> str:
    """Start a job whose first node has the master only; where others join it."""
    settings = run.folder / "job.yaml"
    settings.write_text("master_alone: true\nnodes: 2\nlost_after_s: 5\n")
    run.train("-c", str(settings), "--bind", "127.0.0.1:0", "--stages", "2", "--copy-every", "1", *flags)
    until(lambda: "--join " in run.text(), why=run.story)
    return run.text().partition("--join ")[2].split()[0]


def lose(run: PipelineRun, pid: int) -> None:
    """Have the script kill this process, as soon as all stages of a copy are acknowledged."""
    (run.folder / "lose.tmp").write_text(str(pid))
    (run.folder / "lose.tmp").rename(run.folder / "lose")


def ended_like_an_undisturbed_one(run: PipelineRun, node: str) -> tuple[int, str]:
    """The state of the worker that ended on ``node`` is that of an undisturbed twin. How many steps are void, and what
    was said."""
    assert run.wait(240) == 0, run.story() + run.join_text(node)
    run.wait_join(node)
    logs = (run.folder / node / "logs" / "worker-0.log").read_text()
    expected, digest = alone(run)
    assert re.findall(r"state ([0-9a-f]{16})", logs) == [digest], run.story() + logs
    state = torch.load(run.folder / "state0.pt")[0]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    code, out = run.everstep("audit", str(run.run_dir))
    assert code == 0 and "exactly once" in out, out
    void = re.search(r"steps committed 62(?:, (\d+) more void)?", out)
    assert void is not None, out
    return int(void[1] or 0), run.text() + logs


def test_a_lost_machine_costs_a_step_besides_the_one_in_hand(run: PipelineRun) -> None:
    """Its agent is killed, and its template and all its stages with it."""
    run.write(pause="0.05", change=LOSE)
    at = begin(run)
    join(run, at, "b", "--machine", "mb")
    run.alive(Role.WORKER, 0)
    join(run, at, "c", "--machine", "mc")
    lose(run, run.joined["b"].pid)
    void, text = ended_like_an_undisturbed_one(run, "c")
    assert run.wait_join("b") == -9, text
    assert "from the copy of worker:0" in text and void <= 2, text


def test_a_lost_template_costs_no_more(run: PipelineRun) -> None:
    """The memory of the own machine goes with the template; the machine has no second node's worker to ask."""
    run.write(pause="0.02", change=LOSE)
    at = begin(run)
    join(run, at, "b", "--machine", "mb")
    run.alive(Role.WORKER, 0)
    started = re.search(r"template started, pid (\d+)", (run.folder / "b" / "logs" / "agent.log").read_text())
    assert started is not None
    lose(run, int(started[1]))
    void, text = ended_like_an_undisturbed_one(run, "b")
    assert "from the copy of worker:0" in text and void <= 2, text
