"""How a job ends: what stands behind the loop is part of the script, and is not lost with the worker that runs it."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
from local_jobs import Run, until

SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np, torch
from torch import nn
import everstep as es

here = Path({here!r})
job = es.join()
life = os.environ["EVERSTEP_SLOT"] + "." + os.environ["EVERSTEP_INCARNATION"]
top = job.chief if {cached} else None
if job.slot == 0 and {late}:
    while not (here / "late").exists():
        time.sleep(0.05)
rng = np.random.default_rng(0)
ids = rng.integers(0, 50, (640, 2))
data = {{"ids": ids, "label": (ids.sum(1) % 2).astype(np.float32)}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4, mode="sum")
        self.top = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, b):
        if self.training:
            self.seen += 1
        return self.top(self.bag(b["ids"])).squeeze(1)

net = Net()
model = job.replicate(job.sparse(net) if job.spec.ps else net)
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
for loop in range({loops}):
    for batch in job.steps(job.loader(data, batch_size=32, epochs=2)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        opt.zero_grad(); loss.backward(); opt.step()
chief = job.chief if top is None else top
(here / f"end-{{life}}").write_text(str(chief))
if chief:
    with job.once("upload") as first:
        if first:
            with open(here / "uploads", "a") as out:
                out.write(life + " ")
    (here / "evaluating").write_text(f"{{os.getpid()}} {{life}}")
    while not (here / "go").exists():
        time.sleep(0.05)
    with job.eval(model):
        torch.save(model.state_dict(), here / "model.tmp")
    os.replace(here / "model.tmp", here / "model.pt")
    (here / "saved").write_text(life)
"""


class EndRun(Run):
    def write(self, loops: int = 1, late: bool = False, cached: bool = False) -> None:  # type: ignore[override]
        self.script.write_text(SCRIPT.format(here=str(self.folder), loops=loops, late=late, cached=cached))

    def chief_pid(self, other_than: int = 0) -> int:
        """Of the chief, once it is behind the loop."""
        found: list[int] = []

        def look() -> bool:
            with contextlib.suppress(OSError, ValueError):
                pid = int((self.folder / "evaluating").read_text().split()[0])
                if pid != other_than:
                    found.append(pid)
            return bool(found)

        until(look, why=self.story)
        return found[0]

    def ended(self, life: str) -> None:
        until((self.folder / f"end-{life}").exists, why=self.story)

    def go(self) -> None:
        (self.folder / "go").touch()

    def saved_well(self, by: str = "") -> None:
        self.ended_well()
        said = (self.folder / "saved").read_text()
        assert by in ("", said), self.story()
        state = torch.load(self.folder / "model.pt", weights_only=True)
        assert "top.weight" in state and state["top.weight"].abs().sum() > 0
        assert len((self.folder / "uploads").read_text().split()) == 1, "job.once was done twice"


RUN = EndRun
PS, GROUP, HYBRID = ("--ps", "1"), ("--mode", "allreduce"), ("--mode", "allreduce", "--ps", "1")


@pytest.mark.parametrize("mode", [PS, GROUP, HYBRID], ids=["ps", "group", "hybrid"])
def test_the_chief_killed_twice_behind_the_loop_and_the_result_is_there(run: EndRun, mode: tuple[str, ...]) -> None:
    run.start("--workers", "2", *mode)
    first = run.chief_pid()
    run.ended("1.1")
    os.kill(first, signal.SIGKILL)
    second = run.chief_pid(other_than=first)
    os.kill(second, signal.SIGKILL)
    run.go()
    run.saved_well("0.3")
    if mode is GROUP:
        assert torch.load(run.folder / "model.pt", weights_only=True)["seen"].item() == 20, "not the final state"
        assert "steps void" not in run.text()


def test_the_only_worker_killed_behind_the_loop_trains_again_or_goes_on_and_saves(run: EndRun) -> None:
    run.start("--workers", "1", *GROUP)
    os.kill(run.chief_pid(), signal.SIGKILL)
    run.go()
    run.saved_well("0.2")


@pytest.mark.parametrize("cached", [False, True], ids=["asked", "cached"])
def test_a_late_chief_hands_the_duty_on_or_gets_the_state(run: EndRun, cached: bool) -> None:
    """Where its script asks at the end, another worker saves; where it asked at its top, the late one does."""
    run.write(late=True, cached=cached)
    run.start("--workers", "3", *GROUP)
    run.go()
    run.ended("1.1")
    run.ended("2.1")
    (run.folder / "late").touch()
    run.saved_well("0.1" if cached else "1.1")


def test_a_chief_drained_behind_the_loop_is_replaced(run: EndRun) -> None:
    run.start("--workers", "2", *PS)
    run.chief_pid()
    run.ended("1.1")
    code, text = run.everstep("drain", str(run.run_dir), "worker:0")
    assert code == 0, text
    run.go()
    run.saved_well("0.2")
