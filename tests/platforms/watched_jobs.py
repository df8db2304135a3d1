"""What jobs on a cluster have in common: their script, and what is seen of their master."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from everstep.agent.rundir import in_use
from everstep.cli.link import ask_view
from everstep.errors import EverstepError
from everstep.model.job_view import JobView

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


class WatchedJob:
    """Is a job whose script is in ``folder``. It ends quickly once ``hurry_file`` is there."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.folder, self.run_dir = folder, run_dir
        self.script, self.hurry_file = folder / "train.py", folder / "hurry"

    def write(self, epochs: int, sparse: bool = True) -> None:
        text = SCRIPT.replace("SPARSE", "job.sparse" if sparse else "").replace("EPOCHS", str(epochs))
        self.script.write_text(text.replace("HURRY", repr(str(self.hurry_file))))

    def view(self) -> JobView | None:
        if not in_use(self.run_dir):
            return None
        with contextlib.suppress(EverstepError):
            return ask_view(self.run_dir)
        return None

    def samples(self) -> int:
        view = self.view()
        return view.samples_total if view is not None else 0
