"""Real jobs on a cluster of this machine: what a user runs, and what is seen of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from everstep.agent.rundir import in_use
from everstep.cli.display import read_summary
from everstep.cli.link import ask_view
from everstep.errors import EverstepError
from everstep.model.job_view import JobView
from everstep.monitor.audit import audit

SCRIPT = """
import os, time
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
rng = np.random.default_rng(0)
ids = rng.integers(0, 500, (4000, 2))
data = {"ids": ids, "label": (ids.sum(1) % 2).astype(np.float32)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(500, 4, mode="sum")
        self.top = nn.Linear(4, 1)
    def forward(self, b):
        return self.top(self.bag(b["ids"])).squeeze(1)

model = job.replicate(SPARSE(Net()))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
for batch in job.steps(job.loader(data, batch_size=20, epochs=EPOCHS)):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad(); loss.backward(); opt.step()
    job.report(loss=loss)
    if not os.path.exists(HURRY):
        time.sleep(0.2)
"""


def until(what: Callable[[], object], why: Callable[[], str], timeout_s: float = 180.0) -> None:
    """Wait for something, for as long as a loaded machine may need."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"it did not happen within {timeout_s} s: {why()}"
        time.sleep(0.1)


class ClusterRun:
    """Is one ``everstep run --on ...`` and its run directory."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.env = folder, {**os.environ, **env}
        self.script, self.run_dir = folder / "train.py", folder / "run"
        self.hurry_file = folder / "hurry"
        self.process: subprocess.Popen[bytes] | None = None
        self.words: list[str] = []

    def write(self, epochs: int, sparse: bool) -> None:
        text = SCRIPT.replace("SPARSE", "job.sparse" if sparse else "").replace("EPOCHS", str(epochs))
        self.script.write_text(text.replace("HURRY", repr(str(self.hurry_file))))

    def start(self, *words: str) -> None:
        """Begin, or begin again with the same words."""
        self.words = list(words) or self.words
        argv = [sys.executable, "-m", "everstep.cli", "run", "--no-display", "--run-dir", str(self.run_dir)]
        with (self.folder / "everstep.log").open("ab") as out:
            self.process = subprocess.Popen(
                [*argv, *self.words, str(self.script)], env=self.env, stdout=out, stderr=out, cwd=self.folder
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def everstep(self, *words: str) -> str:
        argv = [sys.executable, "-m", "everstep.cli", *words]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr + self.story()
        return done.stdout

    def view(self) -> JobView | None:
        if not in_use(self.run_dir):
            return None
        with contextlib.suppress(EverstepError):
            return ask_view(self.run_dir)
        return None

    def samples(self) -> int:
        view = self.view()
        return view.samples_total if view is not None else 0

    def trained(self, more: int) -> None:
        until(lambda: self.view() is not None, self.story)
        start = self.samples()
        until(lambda: self.samples() >= start + more, self.story)

    def nodes(self) -> list[str]:
        view = self.view()
        return sorted(n.node for n in view.nodes if n.alive and n.node != "node0") if view is not None else []

    def whole(self, nodes: int) -> None:
        """Wait until so many nodes are there, and every member."""

        def ok() -> bool:
            view = self.view()
            if view is None or len(self.nodes()) != nodes:
                return False
            up = [m for m in view.members if m.up and m.role != "master"]
            return len(up) == sum(view.members_wanted.values())

        until(ok, self.story)

    def story(self) -> str:
        logs = [self.folder / "everstep.log", *sorted(self.run_dir.glob("nodes/*.log"))]
        ends = [f"--- {log.name}\n" + log.read_text(errors="replace")[-1500:] for log in logs if log.exists()]
        view = self.view()
        shown = (view.nodes, view.members_wanted, [(str(m), m.state, m.node) for m in view.members]) if view else None
        return f"{shown}\n" + "\n".join(ends)

    def ends_well(self) -> None:
        """Let the job end: its audit is exact."""
        self.hurry_file.touch()
        assert self.process is not None
        assert self.process.wait(300) == 0, self.story()
        summary = read_summary(self.run_dir)
        assert summary is not None and summary.exit_code == 0, self.story()
        report = audit(self.run_dir)
        assert report.ok, report.text() + self.story()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            self.process.kill()
            self.process.wait(30)
