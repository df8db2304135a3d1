"""Random numbers: before, in and after backward."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from meaning.kit import Net, Script
from meaning.table import Result, row, topic

RANDOM = topic("Random numbers")
STREAMS = {
    "async bounded sync elastic fixed logical logical-2 passes hybrid-2 shard": "Random numbers come from a stream of "
    "the seed and the samples in hand, so that a batch computed again has the same: other numbers than one process "
    "draws from one stream, of the same distribution."
}
OWN = {
    "sync elastic fixed logical logical-2 passes hybrid-2 shard": "A generator of the script's own is drawn from once "
    "an iteration, by each worker and in each pass."
}


def train(s: Script, change: Any) -> Result:
    opt = s.sgd()
    for batch in s.batches():
        batch = change(batch)
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(RANDOM, "dropout", stated=STREAMS)
def dropout(es: Any) -> Result:
    return train(Script(es, lambda: Net(nn.Dropout(0.3))), lambda b: b)


@row(RANDOM, "noise on inputs, drawn before forward", stated=STREAMS)
def noise_before(es: Any) -> Result:
    return train(Script(es), lambda b: {**b, "x": b["x"] + 0.1 * torch.randn_like(b["x"])})


@row(RANDOM, "random numbers drawn after `step`, and dropout", stated=STREAMS)
def drawn_after(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.Dropout(0.3)))
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        torch.rand(3)
    return s.end()


@row(RANDOM, "negative sampling: `torch.randint` ids looked up in a table", stated=STREAMS)
def negatives(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        negative = s.model.rows(torch.randint(0, 20, (len(batch["y"]),)))
        (s.loss(batch) + 0.1 * torch.sigmoid(negative.sum(1)).mean()).backward()
        opt.step()
    return s.end()


@row(RANDOM, "mixup with `torch.randperm` and a Beta distribution", stated=STREAMS)
def mixup(es: Any) -> Result:
    def mix(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lam = torch.distributions.Beta(0.4, 0.4).sample()
        order = torch.randperm(len(batch["y"]))
        return {**batch, **{k: lam * batch[k] + (1 - lam) * batch[k][order] for k in ("x", "y")}}

    return train(Script(es), mix)


@row(RANDOM, "numpy's global random numbers", stated=STREAMS)
def numpy_noise(es: Any) -> Result:
    np.random.seed(0)
    s = Script(es)
    np.random.seed(1)
    return train(s, lambda b: {**b, "x": b["x"] + np.float32(0.1 * np.random.rand())})


@row(RANDOM, "Python's `random`", stated=STREAMS)
def python_random(es: Any) -> Result:
    s = Script(es)
    random.seed(1)
    return train(s, lambda b: {**b, "x": b["x"] + 0.1 * random.random()})


@row(RANDOM, "a `torch.Generator` of the script's own", stated=OWN)
def own_generator(es: Any) -> Result:
    s = Script(es)
    generator = torch.Generator().manual_seed(9)
    return train(s, lambda b: {**b, "x": b["x"] + 0.1 * torch.randn(b["x"].shape, generator=generator)})


@row(RANDOM, "`torch.manual_seed(7)` in each iteration, and dropout", stated=OWN)
def seeded_each(es: Any) -> Result:
    def seed(batch: Any) -> Any:
        torch.manual_seed(7)
        return batch

    return train(Script(es, lambda: Net(nn.Dropout(0.3))), seed)


@row(RANDOM, "`torch.manual_seed` by the script before the model is built")
def seeded_first(es: Any) -> Result:
    def make() -> Net:
        torch.manual_seed(123)
        return Net()

    return train(Script(es, make), lambda b: b)


@row(RANDOM, "stochastic depth: a layer left out by a coin for each batch", stated=STREAMS)
def stochastic_depth(es: Any) -> Result:
    class Coin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and float(torch.rand(())) < 0.5:
                return x
            out: torch.Tensor = x + self.layer(x)
            return out

    return train(Script(es, lambda: Net(Coin())), lambda b: b)


@row(RANDOM, "`nn.RReLU` and Gaussian noise in forward", stated=STREAMS)
def rrelu(es: Any) -> Result:
    return train(Script(es, lambda: Net(nn.RReLU())), lambda b: b)


@row(RANDOM, "Gumbel softmax", stated=STREAMS)
def gumbel(es: Any) -> Result:
    class Gumbel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gumbel_softmax(x, tau=1.0)

    return train(Script(es, lambda: Net(Gumbel())), lambda b: b)


@row(RANDOM, "augmentation from a seed of (sample, epoch): `seeds=True`")
def augmented(es: Any) -> Result:
    def augment(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        noise = [torch.randn(4, generator=torch.Generator().manual_seed(int(k) % 2**31)) for k in batch["seeds"]]
        return {**batch, "x": batch["x"] + 0.1 * torch.stack(noise)}

    return train(Script(es, loader={"seeds": True}), augment)
