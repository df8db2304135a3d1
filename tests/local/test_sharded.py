"""Workers of several processes, with a model that FSDP2 shards over them: killed and stopped in mid-backward, and
resumed with another number of processes, they train what plain PyTorch trains in one process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from local_jobs import Run
from torch import nn

from everstep.cli.status import stop_job
from everstep.data.loader import Loader

torch.set_num_threads(1)  # other tests fork from this process
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

MODEL = """
import os, signal, sys, time
import torch
from torch import nn

def data():
    made = torch.Generator().manual_seed(1)
    x = torch.randn({rows}, 8, generator=made)
    return {{"x": x.numpy(), "y": (x @ torch.randn(8, 3, generator=made)).tanh().numpy()}}

def build():
    return nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 3))

def backward(model, batch, hook=None):
    out = model(batch["x"])
    if hook is not None:
        out.register_hook(hook)
    loss = (out - batch["y"]).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""

SCRIPT = """
from torch.distributed.fsdp import fully_shard
import everstep as es

torch.set_num_threads(1)
job = es.join(mode="allreduce")
model = build()
for part in (model[2], model):
    fully_shard(part, mesh=job.device_mesh)
model = job.replicate(model)
opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
life = int(os.environ["EVERSTEP_INCARNATION"])
deaths = eval(open("deaths").read())

def die(gradient):
    os.kill(os.getpid(), deaths[job.step, job.slot, job.process_index, life])

for batch in job.steps(job.loader(data(), batch_size={batch}, epochs=2)):
    opt.zero_grad()
    backward(model, batch, die if (job.step, job.slot, job.process_index, life) in deaths else None)
    opt.step()
    time.sleep({pause})
state = job.state_dict()["models"][0]
digest = job.digest()
if job.process_index == 0:
    torch.save(state, "state%d.tmp" % job.slot)
    os.replace("state%d.tmp" % job.slot, "state%d.pt" % job.slot)
    print("state", digest, flush=True)
    while ("behind", job.slot, life) in deaths:
        if os.path.exists("state1.pt"):
            os.kill(os.getpid(), 9)
        time.sleep(0.05)
"""

ROWS, BATCH, GLOBAL_BATCH = 800, 10, 40


class ShardedRun(Run):
    @property
    def deaths(self) -> Path:
        return self.folder / "deaths"

    def write(self, pause: str = "0.0") -> None:
        self.script.write_text((MODEL + SCRIPT).format(rows=ROWS, batch=BATCH, pause=pause))

    def train(self, *flags: str, deaths: str = "{}") -> ShardedRun:
        assert self.popen is None
        self.deaths.write_text(deaths)
        self.start("--mode", "allreduce", "--strategy", "fixed", *flags)
        return self

    def start_verb(self, *argv: str) -> None:
        with self.out.open("wb") as out:
            command = [sys.executable, "-m", "everstep.cli", *argv]
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder)

    def logs(self) -> str:
        return "".join(log.read_text() for log in sorted((self.run_dir / "logs").glob("worker-*.log")))

    def finished(self, states: int) -> None:
        """Well: all samples exactly once, the same state on all workers, and that of one process of plain PyTorch."""
        assert self.wait(240) == 0, self.story() + self.logs()
        code, out = self.everstep("audit", str(self.run_dir))
        assert code == 0 and "exactly once" in out, out
        found = re.findall(r"state ([0-9a-f]{16})", self.logs())
        assert len(found) == states and len(set(found)) == 1, self.story()
        assert self.leftovers() == {}
        state = torch.load(self.folder / "state0.pt")
        for name, expected in plain().items():
            torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-5)


def plain() -> dict[str, torch.Tensor]:
    """The weights, trained in this process."""
    names: dict[str, object] = {}
    exec(MODEL.format(rows=ROWS), names)
    torch.manual_seed(0)
    model: nn.Module = names["build"]()  # type: ignore[operator]
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = Loader(names["data"](), GLOBAL_BATCH, epochs=2, seed=0)  # type: ignore[operator]
    for epoch in range(2):
        for lo in range(0, ROWS, GLOBAL_BATCH):
            opt.zero_grad()
            names["backward"](model, loader.read(epoch, lo, lo + GLOBAL_BATCH))  # type: ignore[operator]
            opt.step()
    return model.state_dict()


RUN = ShardedRun


def test_processes_of_both_workers_are_killed_in_mid_backward(run: ShardedRun) -> None:
    """First one that is not the leader of its worker; then a leader."""
    run.write("0.05")
    run.train("--workers", "2", "--processes-per-worker", "2", deaths="{(4, 1, 1, 1): 9, (34, 0, 0, 1): 9}")
    run.finished(states=2)
    assert "process 1 of this worker ended with status -9: all of it ends" in run.logs()
    assert "failures survived: 2 worker" in run.text()


@pytest.mark.slow
def test_the_chief_is_killed_behind_the_loop_when_the_other_worker_has_ended(run: ShardedRun) -> None:
    """Its state cannot be followed step by step: the one in its place copies what the other one has kept."""
    run.write()
    run.train("--processes-per-worker", "2", "--workers", "2", deaths=f"{{('behind', 0, 1): {signal.SIGKILL.value}}}")
    run.finished(3)


def test_stopped_and_resumed_with_another_number_of_processes(run: ShardedRun) -> None:
    """A process that is stopped is a loss of its worker, too; so one worker is there for a while, and then both."""
    run.write(pause="0.02 if job.step < 22 else 0.3")
    run.train(
        "--workers", "2", "--processes-per-worker", "2", "--checkpoint-every", "5batches", deaths="{(12, 0, 1, 1): 19}"
    )
    run.trained(22 * GLOBAL_BATCH)
    stop_job(run.run_dir, True)
    assert run.wait() == 0, run.story()
    assert "process 1 of this worker is stopped: all of it ends" in run.logs()
    run.write()
    run.deaths.write_text("{}")
    old, run.run_dir = run.run_dir, run.folder / "resumed"
    argv = [
        "resume",
        str(old),
        "--workers",
        "1",
        "--processes-per-worker",
        "4",
        "--run-dir",
        str(run.run_dir),
        "--no-display",
    ]
    run.start_verb(*argv)
    run.finished(states=1)
    assert "resume: checkpoint" in run.text()
