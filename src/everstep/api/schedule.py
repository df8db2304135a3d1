"""Keeps one schedule for the job: schedulers that the script steps in the loop count the job's steps, whoever does
them.

The number of steps is a buffer of the job (``api/ps_buffers.py``): each worker adds its own, and sees those of all with
the next batch. A scheduler that a worker's script has stepped in an iteration is brought up to that number before the
next one; so is that of a worker that comes later, before its first iteration. Schedulers that are stepped behind a loop
(once an epoch) are left alone: every worker runs every loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class StepCount(nn.Module):
    """Counts the job's steps. ``by_step`` float32 [16]: more than 0 for each of the first schedulers that some worker's
    script has stepped in the loop."""

    steps: Tensor
    by_step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("by_step", torch.zeros(16))


class JobSchedule:
    """The schedulers that were given to ``job.track``, driven by the job's steps. ``alone``: they are the script's, as
    in plain PyTorch; ``several``: workers have the script."""

    def __init__(self, alone: bool, several: bool) -> None:
        self.count = StepCount()
        self._alone, self._several = alone, several
        self._rates: list[float] | None = None  # learning rates when the iteration began; None: nobody asks for them
        self._schedulers: list[Any] = []
        self._by_step: set[int] = set()  # of ``_schedulers``: stepped in the loop
        self._begun: list[int] = []

    @property
    def used(self) -> bool:
        return bool(self._schedulers)

    def track(self, scheduler: Any) -> None:
        """Plateau schedulers go by a metric and not by a count: they are not driven."""
        counted = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and not isinstance(
            scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
        )
        if counted and not any(s is scheduler for s in self._schedulers):
            self._schedulers.append(scheduler)

    @property
    def counted(self) -> StepCount | None:
        """Return the count of the job's steps, where there is one."""
        return self.count if self._schedulers and not self._alone else None

    def stepped(self) -> None:
        """An optimizer step of this worker is about to be pushed."""
        if self.used:
            self.count.steps += 1

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """A batch is in hand: bring schedulers up to the job's steps."""
        if self._alone:
            return
        if not self._schedulers:
            self._rates = _rates_of(optimizers) if self._several else None
            return
        steps = round(float(self.count.steps))
        self._by_step |= {i for i, n in enumerate(self.count.by_step.tolist()[: len(self._schedulers)]) if n}
        for i in self._by_step:
            scheduler = self._schedulers[i]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch counts the calls of opt.step() in this process
                while scheduler.last_epoch < steps:
                    scheduler.step()
        self._begun = [s.last_epoch for s in self._schedulers]

    def end(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The script is through with the batch. Of a schedule that the job does not know it is said once."""
        if self._alone:
            return
        if not self._schedulers:
            if self._rates is not None and self._rates != _rates_of(optimizers):
                self._several = False
                print(
                    "everstep: the learning rate changes in the loop by something that the job does not know, so each "
                    "worker counts its own iterations: job.track(scheduler=scheduler) makes it one schedule for the "
                    "job",
                    flush=True,
                )
            return
        new = {i for i, was in enumerate(self._begun) if self._schedulers[i].last_epoch != was} - self._by_step
        self._by_step |= new
        for i in new:
            if i < len(self.count.by_step):
                self.count.by_step[i] += 1


def _rates_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
