"""Weights and other state that the script changes itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from meaning.kit import DIM, Net, Script, as_it_lies, whole
from meaning.table import Result, row, topic

WEIGHTS = topic("Weights and state that the script changes")


PARTS = "sync elastic fixed logical logical-2 passes hybrid-2 shard"
NORM = {PARTS: "Batch norm normalises with the statistics of one worker's batch, or of one pass, as with DDP."}
MEANS = {PARTS: "A buffer that forward computes from a batch is computed from one worker's batch, or of one pass."}


def train(s: Script, opt: Any, after: Any = lambda: None) -> Result:
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        after()
    return s.end()


@row(WEIGHTS, "weights clamped after `step` (WGAN)")
def clamped(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        with torch.no_grad():
            for p in s.model.dense():
                p.clamp_(-0.2, 0.2)

    return train(s, s.sgd(), after)


@row(WEIGHTS, "the same by `p.data.clamp_`")
def clamped_data(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        for p in s.model.dense():
            p.data.clamp_(-0.2, 0.2)

    return train(s, s.sgd(), after)


@row(WEIGHTS, "the same by assignment: `p.data = ...`")
def assigned_data(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        for p in s.model.dense():
            p.data = p.data.clamp(-0.2, 0.2)

    return train(s, s.sgd(), after)


@row(WEIGHTS, "rows of a layer renormed after `step` (`torch.renorm`)")
def renormed(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        with torch.no_grad():
            w = s.model.first.weight
            w.copy_(as_it_lies(torch.renorm(whole(w), 2, 0, 0.5), w))

    return train(s, s.sgd(), after)


@row(WEIGHTS, "weight decay by hand after `step`")
def decayed_by_hand(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        with torch.no_grad():
            for p in s.model.dense():
                p.mul_(0.99)

    return train(s, s.sgd(), after)


@row(WEIGHTS, "a table's weight edited before the loop")
def table_edited_before(es: Any) -> Result:
    s = Script(es)
    with torch.no_grad():
        s.model.emb.weight.mul_(0.5)
    return train(s, s.sgd())


@row(WEIGHTS, "a table's weight edited between two loops")
def table_edited_between(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for _ in range(2):
        for batch in s.batches(epochs=1):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
        with torch.no_grad():
            s.model.emb.weight.mul_(0.5)
    return s.end()


@row(WEIGHTS, "a table's weight assigned between two loops: `weight.data = ...`")
def table_data_between(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for _ in range(2):
        for batch in s.batches(epochs=1):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
        s.model.emb.weight.data = s.model.emb.weight.data * 0.5
    return s.end()


@row(WEIGHTS, "a table's weight assigned in an iteration, before its forward: `weight.data = ...`")
def table_data_in_loop(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for i, batch in enumerate(s.batches()):
        if i == 3:
            s.model.emb.weight.data = s.model.emb.weight.data * 0.5
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(WEIGHTS, "weights edited before the loop")
def edited_before(es: Any) -> Result:
    s = Script(es)
    with torch.no_grad():
        for p in s.model.dense():
            p.mul_(0.5)
    return train(s, s.sgd())


@row(WEIGHTS, "weights edited between two loops")
def edited_between(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for _ in range(2):
        for batch in s.batches(epochs=1):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
        with torch.no_grad():
            for p in s.model.dense():
                p.mul_(0.5)
    return s.end()


@row(WEIGHTS, "weights read after `step`, in the same iteration")
def read_after_step(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(), lambda: s.each("norm", torch.stack([whole(p.detach()).norm() for p in s.model.dense()])))


@row(WEIGHTS, "the loss computed anew after `step`, on the same batch")
def loss_after_step(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        with torch.no_grad():
            s.each("after", nn.functional.mse_loss(s.model(batch), batch["y"]))
    return s.end()


@row(WEIGHTS, "EMA of the dense weights in tensors of the script")
def ema_outside(es: Any) -> Result:
    s = Script(es)
    ema = [p.detach().clone() for p in s.model.dense()]

    def after() -> None:
        with torch.no_grad():
            for e, p in zip(ema, s.model.dense(), strict=True):
                e.lerp_(p, 0.1)

    out = train(s, s.sgd(), after)
    return out | {f"ema{i}": whole(e).numpy() for i, e in enumerate(ema)}


class Average(nn.Module):
    """A moving average of a model's dense weights, in buffers."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        for i, p in enumerate(net.dense()):
            self.register_buffer(f"e{i}", p.detach().clone())

    def update(self, net: Any) -> None:
        with torch.no_grad():
            for e, p in zip(self.buffers(), net.dense(), strict=True):
                e.lerp_(p, 0.1)


@row(WEIGHTS, "EMA in a module, tracked by `job.track`")
def ema_tracked(es: Any) -> Result:
    s = Script(es)
    average = Average(s.model)
    s.job.track(average=average)
    out = train(s, s.sgd(), lambda: average.update(s.model))
    return out | {name: whole(e).numpy() for name, e in average.named_buffers()}


@row(WEIGHTS, "`torch.optim.swa_utils.AveragedModel` of the dense part")
def averaged_model(es: Any) -> Result:
    s = Script(es)
    averaged = torch.optim.swa_utils.AveragedModel(s.model.last)
    s.job.track(averaged=averaged)
    out = train(s, s.sgd(), lambda: averaged.update_parameters(s.model.last))
    return out | {f"swa.{n}": whole(v.detach()).numpy() for n, v in averaged.state_dict().items()}


@row(WEIGHTS, "a momentum teacher: a copy of the model that follows it and gives targets")
def teacher(es: Any) -> Result:
    class Student(Net):
        def __init__(self) -> None:
            super().__init__()
            self.guide = copy.deepcopy(self.last).requires_grad_(False)

    s = Script(es, Student)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        h = s.model.hidden(batch)
        loss = nn.functional.mse_loss(s.model.last(h), batch["y"] + 0.1 * s.model.guide(h.detach()))
        loss.backward()
        opt.step()
        with torch.no_grad():
            for t, p in zip(s.model.guide.parameters(), s.model.last.parameters(), strict=True):
                t.lerp_(p, 0.1)
    return s.end()


@row(WEIGHTS, "a target network copied every 4 steps (`load_state_dict`)")
def target_network(es: Any) -> Result:
    class Student(Net):
        def __init__(self) -> None:
            super().__init__()
            self.target = copy.deepcopy(self.last).requires_grad_(False)

    s = Script(es, Student)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        h = s.model.hidden(batch)
        loss = nn.functional.mse_loss(s.model.last(h), batch["y"] + 0.1 * s.model.target(h.detach()))
        loss.backward()
        opt.step()
        if s.job.step % 4 == 3:
            s.model.target.load_state_dict(s.model.last.state_dict())
    return s.end()


@row(WEIGHTS, "two dense layers with one weight (weight tying)")
def tied(es: Any) -> Result:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8, bias=False))
            self.again = nn.Linear(8, 8)
            self.again.weight = self.middle.weight

        def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.tanh(self.again(super()._hidden(batch)))

    s = Script(es, Tied)
    return train(s, s.sgd())


@row(WEIGHTS, "an embedding's weight tied to a linear layer (language models)")
def tied_to_table(es: Any) -> Result:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 20, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = super().forward(batch) + self.out(batch["x"]).mean(1, keepdim=True)
            return out

    s = Script(es, Tied)
    return train(s, s.sgd())


@row(WEIGHTS, "the same with `only=` that leaves the tied embedding dense")
def tied_left_dense(es: Any) -> Result:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 20, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = super().forward(batch) + self.out(batch["x"]).mean(1, keepdim=True)
            return out

    s = Script(es, Tied, sparse={"only": ["bag"]})
    return train(s, s.sgd())


@row(WEIGHTS, "spectral norm (`nn.utils.parametrizations`)")
def spectral(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))))
    return train(s, s.sgd())


@row(WEIGHTS, "weight norm (`nn.utils.parametrizations`)")
def weight_norm(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))))
    return train(s, s.sgd())


@row(WEIGHTS, "a buffer that counts batches")
def counting_buffer(es: Any) -> Result:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    s = Script(es, Counts)

    def after() -> None:
        s.model.seen += 1

    return train(s, s.sgd(), after)


@row(WEIGHTS, "a running mean of inputs in a buffer, by assignment in forward", stated=MEANS)
def running_mean(es: Any) -> Result:
    class Means(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * batch["x"].mean(0)
            return super().forward({**batch, "x": batch["x"] - self.mean})

    s = Script(es, Means)
    return train(s, s.sgd())


@row(WEIGHTS, "batch norm", stated=NORM)
def batch_norm(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.BatchNorm1d(8)))
    return train(s, s.sgd())


@row(WEIGHTS, "batch norm with `momentum=None` (a cumulative mean)", stated=NORM)
def batch_norm_cumulative(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.BatchNorm1d(8, momentum=None)))
    return train(s, s.sgd())


@row(WEIGHTS, "batch norm, and an evaluation with its running values", stated=NORM)
def batch_norm_evaluated(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.BatchNorm1d(8)))
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    with s.job.eval(s.model):
        s.note("out", s.model({k: torch.as_tensor(v) for k, v in s.data.items()}))
    return s.end()


@row(WEIGHTS, "layer norm and group norm", atol=1e-3)
def layer_norm(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.Sequential(nn.LayerNorm(8), nn.GroupNorm(2, 8))))
    return train(s, s.sgd())


@row(WEIGHTS, "`torch.nn.init` of a layer in the middle of training (a reset)")
def reset(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        if s.job.step == 6:
            with torch.no_grad():
                s.model.last.weight.fill_(0.1)

    return train(s, s.sgd(), after)


@row(WEIGHTS, "Lookahead by hand: slow weights copied back every 5 steps")
def lookahead(es: Any) -> Result:
    s = Script(es)
    slow = [p.detach().clone() for p in s.model.dense()]

    def after() -> None:
        if s.job.step % 5 == 4:
            with torch.no_grad():
                for w, p in zip(slow, s.model.dense(), strict=True):
                    w.lerp_(p, 0.5)
                    p.copy_(w)

    return train(s, s.sgd(), after)


@row(WEIGHTS, "a table's rows edited after `step` (clamped)")
def table_clamped(es: Any) -> Result:
    s = Script(es)

    def after() -> None:
        with torch.no_grad():
            s.model.emb.weight.clamp_(-0.5, 0.5)

    return train(s, s.sgd(), after)


@row(
    WEIGHTS,
    "the same of a table of more than 65,536 numbers",
    stated={
        "alone async bounded sync": "Of so large a table `weight` has the rows of the batch: what is done to it is "
        "done to these rows."
    },
)
def table_clamped_large(es: Any) -> Result:
    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20_000, DIM)

    s = Script(es, Large)

    def after() -> None:
        with torch.no_grad():
            s.model.emb.weight.clamp_(-0.5, 0.5)

    return train(s, s.sgd(), after)
