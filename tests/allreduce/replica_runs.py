"""Models, optimizers and steps that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from everstep.allreduce.state import ReplicaState
from everstep.model.group import Position

torch.set_num_threads(1)  # (small tensors; other tests run beside)


class Run:
    """A small model with batch norm, two optimizers, a scheduler, an average and a scaler, that trains on its own."""

    def __init__(self, seed: int = 0, optimizer: str = "adam", width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
        some, rest = list(self.model[0].parameters()), list(self.model[1:].parameters())
        kinds: dict[str, Any] = {
            "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        }
        self.optimizers = [
            kinds[optimizer]([{"params": some}, {"params": rest[:2], "lr": 0.02}]),
            kinds["sgd"](rest[2:]),
        ]
        self.schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(
                self.optimizers[0], max_lr=0.1, total_steps=1000, cycle_momentum=optimizer != "adagrad"
            ),
            torch.optim.lr_scheduler.MultiStepLR(self.optimizers[1], milestones=[3, 3, 20], gamma=0.5),
        ]
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
        self.state = ReplicaState(
            [self.model],
            self.optimizers,
            {
                "one": self.schedulers[0],
                "two": self.schedulers[1],
                "average": self.average,
                "scaler": self.scaler,
            },
        )

    def step(self, clip: bool = True) -> None:
        """One step on data that depends on its number alone."""
        generator = torch.Generator().manual_seed(1000 + self.state.position.step)
        x, y = torch.randn(16, 4, generator=generator), torch.randint(0, 2, (16,), generator=generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.average.update_parameters(self.model)
        for scheduler in self.schedulers:
            scheduler.step()
        position = self.state.position
        self.state.position = Position(position.step + 1, 0, 0, position.sample + 16)
