"""Has a model that counts, to be trained beside the user's own: which samples were applied, and how often.

Each sample of each epoch has a row, and each loop of the script has a number for each epoch. A row gains exactly 1.0
when its sample is applied, by the same gradients, steps, pushes, votes and recoveries as everything else that is
trained. ``everstep audit --witness`` compares that with what the audit says.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from everstep.api import optim
from everstep.api.job import Job
from everstep.api.nn import Embedding
from everstep.errors import ScriptError
from everstep.monitor.witness import EPOCHS_MAX, ROWS, SAMPLES_MAX, witness_key


class _Engine(Protocol):
    def place(self) -> tuple[int, int, int, int] | None: ...


class Witness(nn.Module):
    """Counts applied samples. Make it a part of the model, and add what it returns to the loss::

        net.witness = es.testing.Witness(job, samples=len(data), epochs=3)
        model = job.replicate(job.sparse(net))
        groups = [{"params": rest}, {"params": net.witness.parameters(), "lr": 1.0}]
        opt = job.optimizer(torch.optim.SGD(groups, lr=0.1))
        for batch in job.steps(loader):
            loss = loss_fn(model(batch), batch["label"]) + model.witness(batch["row"])

    Its parameters need plain SGD (no momentum, no decay) with a learning rate of 1. What it returns is 0.0, so the loss
    stays the same. Its gradients must reach the optimizer as they are: leave its parameters out of clipping, and add it
    behind any scaling of the loss.

    ``samples``: of the dataset; ``epochs``: of all loops together; ``loops``: how often the script calls ``job.steps``.
    ``dense=False``: rows on the ps alone, with an optimizer of their own, beside any optimizer of the script.
    """

    def __init__(self, job: Job, samples: int, epochs: int, loops: int = 1, dense: bool = True) -> None:
        super().__init__()
        if not (0 < samples <= SAMPLES_MAX and 0 < epochs <= EPOCHS_MAX and loops > 0):
            raise ScriptError(f"es.testing.Witness: samples={samples}, epochs={epochs}, loops={loops} is out of range")
        spec = job.spec
        on_ps = spec.mode == "ps" or spec.ps > 0
        if not (dense or on_ps):
            raise ScriptError("es.testing.Witness(dense=False) needs tables on the ps: run with --ps 1 or more")
        self._engine = cast(_Engine, job._engine)
        self._averaged = on_ps and spec.mode == "ps" and spec.consistency.startswith("sync")
        self.witness_rows: nn.Module | nn.Parameter
        if on_ps:
            # Where nobody knows yet how many samples a step will have, a gradient says only by its sign that there is
            # one: the first step of Adam moves a row by the learning rate, whatever the gradient's size.
            once = optim.Adam(lr=1.0, eps=1e-20) if self._averaged else optim.SGD(lr=1.0)
            self.witness_rows = Embedding(ROWS, 1, init=optim.Constant(0.0), optimizer=once)
        else:
            self.witness_rows = nn.Parameter(torch.zeros(epochs, samples))
        if dense:
            self.witness_steps = nn.Parameter(torch.zeros(loops, epochs))
        self._shape = samples, epochs, loops

    def forward(self, ids: Tensor) -> Tensor:
        """Count the samples ``ids``: numbers of the batch's samples, each in [0, samples) and of one sample of the
        dataset alone."""
        place = self._engine.place()
        if place is None:
            raise ScriptError("es.testing.Witness outside of job.steps(): it counts what is trained")
        loop, dataset, epoch, total = place
        samples, epochs, loops = self._shape
        ids = torch.as_tensor(ids).reshape(-1).long()
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= samples):
            raise ScriptError(f"es.testing.Witness(samples={samples}): the batch has ids outside of [0, {samples})")
        if epoch >= epochs or loop > loops:
            raise ScriptError(
                f"es.testing.Witness(epochs={epochs}, loops={loops}): the script is in epoch {epoch} (from 0) of loop "
                f"{loop} (from 1)"
            )
        if isinstance(self.witness_rows, nn.Parameter):
            if dataset:
                raise ScriptError("es.testing.Witness: one dataset in mode allreduce without ps")
            rows = self.witness_rows[epoch][ids]
        else:
            rows = self.witness_rows(ids + witness_key(dataset, epoch, 0))
        # The step's gradient is the mean over its samples: each one's share of it becomes one again.
        found = rows.sum() * (total / max(1, ids.numel()) if total else 1.0)
        if hasattr(self, "witness_steps"):
            found = found + self.witness_steps[loop - 1, epoch]
        return found.detach() - found
