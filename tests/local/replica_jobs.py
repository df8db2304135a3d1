"""Jobs in mode allreduce for tests of real processes: a script over real pictures, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from local_jobs import Run, until

from everstep.model.member import Role

EXAMPLES = Path(__file__).parents[2] / "examples"

REPLICA = """
import hashlib, os, sys, time
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
sys.path.insert(0, {examples!r})
import torch
from torch import nn
import everstep as es
from fashion import SAMPLE, read

torch.set_num_threads(1)
torch.use_deterministic_algorithms({gpu})
job = es.join(mode="allreduce")
data = {{k: v[:{rows}] for k, v in read(SAMPLE, "train").items()}}
layers = nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10)
net = nn.Sequential(*layers){place}
model = job.replicate(net)
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
print("worker", job.slot, "begins", flush=True)
for batch in job.steps(job.loader(data, batch_size={batch}, epochs={epochs})):
    loss = nn.functional.cross_entropy(model(batch["image"]{place}), batch["label"].long(){place})
    opt.zero_grad(); loss.backward(); opt.step()
    job.report(loss=loss)
    if not os.path.exists({hurry!r}):
        time.sleep({pause_s})

found = hashlib.sha256()
def take(name, value):
    if isinstance(value, torch.Tensor):
        found.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            take(f"{{name}}.{{key}}", value[key])
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            take(f"{{name}}.{{i}}", item)
    else:
        found.update(f"{{name}}={{value!r}}".encode())
take("", [model.state_dict(), opt.state_dict()])
print("state", found.hexdigest(), "of worker", job.slot, flush=True)
"""
"""Batch norm, dropout and momentum, so that buffers, random state and the optimizer's state are in the digest."""


class ReplicaRun(Run):
    """``everstep run --mode allreduce`` as a subprocess."""

    def write(
        self, rows: int = 1920, epochs: int = 6, pause_s: float = 0.05, batch: int = 64, gpu: bool = False
    ) -> None:
        """``gpu``: the model is on ``job.device``."""
        self.rows, self.epochs = rows, epochs
        facts = {
            "gpu": gpu,
            "place": ".to(job.device)" if gpu else "",
            "rows": rows,
            "epochs": epochs,
            "pause_s": pause_s,
            "batch": batch,
            "hurry": str(self._hurry),
        }
        self.script.write_text(REPLICA.format(examples=str(EXAMPLES), **facts))

    def train(self, workers: int, *flags: str, under: tuple[str, ...] = ()) -> ReplicaRun:
        self.start("--mode", "allreduce", "--workers", str(workers), *flags, under=under)
        return self

    def states(self) -> list[str]:
        """The digests of their final state that workers printed."""
        return re.findall(r"state ([0-9a-f]{64})", self.workers_said())

    def workers_said(self) -> str:
        where = [self.run_dir, *(self.folder / node for node in self.joined)]
        logs = [log for path in where for log in sorted((path / "logs").glob("worker-*.log"))]
        return "".join(log.read_text(errors="replace") for log in logs)

    def pid(self, slot: int, at_least: int = 1) -> int:
        return self.alive(Role.WORKER, slot, at_least).pid

    def entered(self, *slots: int) -> None:
        """Wait until these came into the group while it trained, or the job is over."""
        popen, wanted = self.popen, {f"worker:{slot}" for slot in slots}
        assert popen is not None

        def look() -> bool:
            found = re.findall(r"((?:worker:\d+(?:, )?)+) entered", self.text())
            return wanted <= {who for names in found for who in names.split(", ")} or popen.poll() is not None

        until(look, why=self.story)

    def finished(self, lost: int = 0, states: int | None = None, timeout_s: float = 120.0) -> str:
        """It ended well: every sample exactly once, all workers (at least ``states`` of them) with the same state, and
        not more than ``lost`` workers were lost."""
        assert self.wait(timeout_s) == 0, self.story()
        found = self.states()
        assert found and len(set(found)) == 1, f"{found}\n{self.story()}"
        assert f"done: {self.rows * self.epochs:,} samples" in self.text(), self.text()
        assert self.leftovers() == {}
        self.check_audit()
        failures = json.loads((self.run_dir / "summary.json").read_text())["failures"]
        # Where processes wait seconds for their turn, a healthy one may not be heard for too long, and is replaced.
        crowded = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
        unheard = len(re.findall(r"worker:\d+ lost: .*not heard", self.text())) if crowded else 0
        assert failures.get("worker", 0) <= lost + unheard, self.story()
        assert states is None or len(found) >= states - unheard, self.story()
        return found[0]


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def logical_run(
    folder: Path, workers: int, kills: Sequence[tuple[int, int]], rows: int, gpu: bool = False
) -> tuple[str, str]:
    """Four logical workers on so many real ones; the digest of their state, and what workers said. ``kills``: (when so
    many samples are trained, slot)."""
    folder.mkdir()
    run = ReplicaRun(folder)
    try:
        run.write(rows=rows, epochs=4, pause_s=0.05 if kills else 0.0, batch=8, gpu=gpu)
        run.train(workers, "--logical-workers", "4")
        for samples, slot in kills:
            run.trained(samples)
            os.kill(run.pid(slot), KILL)
        return run.finished(len(kills)), run.workers_said()
    finally:
        run.close()
