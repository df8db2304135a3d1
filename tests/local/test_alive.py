"""Who counts as alive, with real processes: who holds its interpreter is waited for, who hangs is not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from everstep.model.member import Role

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HOLDS = """
import ctypes, os, sys, time
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
native = ctypes.PyDLL(None)  # keeps the interpreter
data = {{"x": np.ones((480, 4), np.float32), "label": np.ones(480, np.float32)}}
model = job.replicate(nn.Linear(4, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

def hold(seconds):
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        native.usleep(ctypes.c_uint(int(min(left, 1000.0) * 1e6)))

def hang():
    hold(10_000.0)

for number, batch in enumerate(job.steps(job.loader(data, batch_size=40, epochs=2))):
    loss = ((model(batch["x"]).squeeze(1) - batch["label"]) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.02)
    {body}
"""

HOLDS_ALL_THE_TIME = "if number % 3 == 1: hold(2.5 if job.slot else 0.5)"
HANGS_ONCE = """if job.slot == 1 and number == {number} and not os.path.exists({flag!r}):
        open({flag!r}, "w").close()
        hang()
    while {number} == 0 and job.slot == 0 and not os.path.exists({flag!r}):
        time.sleep(0.05)  # (else it might train all before worker 1 has come)"""


def happened(run: Run, *actions: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["action"] in actions]


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_a_script_that_holds_its_interpreter_is_waited_for(run: Run, mode: str) -> None:
    run.script.write_text(HOLDS.format(body=HOLDS_ALL_THE_TIME))
    run.start("--mode", mode, "--workers", "2")
    run.ended_well()
    assert happened(run, "lost", "suspect", "restart") == []


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_a_script_that_hangs_is_found_shown_and_replaced(run: Run, mode: str, tmp_path: Path) -> None:
    run.script.write_text(
        HOLDS.format(body=HANGS_ONCE.format(flag=str(tmp_path / "hung"), number=0 if mode == "ps" else 2))
    )
    run.start("--mode", mode, "--workers", "2", "--progress-timeout", "4s")
    run.ended_well()
    (lost,) = happened(run, "lost")
    assert lost["member"] == "worker:1"
    assert "no progress" in lost["reason"] and "train.py line 16 in hold" in lost["reason"], lost
    stack = [line["reason"] for line in happened(run, "stack")]
    assert [frame.rpartition(" in ")[2] for frame in stack] == ["<module>", "hang", "hold"]


def test_a_stopped_worker_is_found_as_ever(run: Run) -> None:
    run.write(epochs=20)
    run.start("--mode", "allreduce", "--workers", "2", "--ps", "1")
    run.trained(400)
    member = run.alive(Role.WORKER, 1)
    os.kill(member.pid, signal.SIGSTOP)
    run.alive(Role.WORKER, 1, at_least=2)
    run.hurry()
    run.ended_well()


def test_who_waits_for_others_does_not_stand_still(run: Run) -> None:
    late = "import os, time\nif os.environ['EVERSTEP_SLOT'] == '1': time.sleep(9)\n"
    run.script.write_text(late + HOLDS.format(body="if number == 3 and job.slot == 1: hold(3.0)"))
    run.start("--mode", "allreduce", "--workers", "2", "--min-workers", "2", "--progress-timeout", "4s")
    run.ended_well()
    assert happened(run, "lost", "restart") == []
