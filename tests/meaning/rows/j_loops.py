"""Loops, evaluation, stopping, saving."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from meaning import kit
from meaning.kit import Net, Script, data
from meaning.table import Result, row, topic

COUNTED = {
    "logical passes": "An iteration is one pass of a step that has several: count steps by `job.step`, not iterations."
}

LOOPS = topic("Loops, evaluation, saving")
BROKEN = {"logical passes": "A loop that is left in a pass before a step's last one leaves that step out."}


def whole(s: Script) -> dict[str, torch.Tensor]:
    return {k: torch.as_tensor(v) for k, v in s.data.items()}


def epoch(s: Script, opt: Any, **options: Any) -> None:
    for batch in s.batches(**{"epochs": 1, **options}):
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()


@row(LOOPS, "one `job.steps` per epoch")
def loop_per_epoch(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for _ in range(3):
        epoch(s, opt)
    return s.end()


@row(LOOPS, "one loader for several loops")
def one_loader(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    loader = s.loader(epochs=1)
    for _ in range(3):
        for batch in s.job.steps(loader):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
    return s.end()


@row(LOOPS, "two loops over data of different lengths (pre-training, then training)")
def two_lengths(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.05)
    for name, n in (("pre", 40), ("main", 96)):
        for batch in s.job.steps(s.job.loader(data(n, seed=n), 8, epochs=2, name=name)):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
    return s.end()


@row(LOOPS, "the same, both loaders of one name")
def two_lengths_one_name(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.05)
    for n in (40, 96):
        for batch in s.job.steps(s.job.loader(data(n, seed=n), 8, epochs=2)):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
    return s.end()


@row(LOOPS, "a second loop with a new optimizer (fine-tuning)")
def fine_tuning(es: Any) -> Result:
    s = Script(es)
    epoch(s, s.sgd())
    epoch(s, s.sgd(0.01, s.model.dense()))
    return s.end()


@row(LOOPS, "a loop inside of a loop: `job.steps` in an iteration of `job.steps`")
def nested(es: Any) -> Result:
    s = Script(es, epochs=1)
    opt = s.sgd(0.02)
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        for other in s.job.steps(s.job.loader(data(16, 3), 8, name="inner")):
            opt.zero_grad()
            s.loss(other).backward()
            opt.step()
    return s.end()


@row(LOOPS, "two loaders side by side: `zip(job.steps(a), job.steps(b))`")
def side_by_side(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.05)
    one, two = s.loader(epochs=1), s.job.loader(data(96, 3), 8, name="other")
    for a, b in zip(s.job.steps(one), s.job.steps(two), strict=True):
        opt.zero_grad()
        (s.loss(a) + s.loss(b)).backward()
        opt.step()
    return s.end()


@row(LOOPS, "a second source read by index beside the loop (`other[step]`)")
def second_source(es: Any) -> Result:
    s = Script(es)
    other = {k: torch.as_tensor(v) for k, v in data(96, 3).items()}
    opt = s.sgd(0.05)
    for batch in s.batches():
        opt.zero_grad()
        rows = batch["row"]
        (s.loss(batch) + s.loss({k: v[rows] for k, v in other.items()})).backward()
        opt.step()
    return s.end()


@row(LOOPS, "evaluation in the middle: `with job.eval(model)`")
def eval_in_loop(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.LayerNorm(8)))
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        if s.job.step % 5 == 4:
            with s.job.eval(s.model):
                s.each("out", s.model(whole(s)).clone())
    return s.end()


@row(LOOPS, "evaluation in the middle by hand: `model.eval()`, `torch.no_grad()`")
def eval_by_hand(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        s.model.train()
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        if s.job.step % 5 == 4:
            s.model.eval()
            with torch.no_grad():
                s.each("out", s.model(whole(s)).clone())
    return s.end()


@row(LOOPS, "evaluation between epochs by hand")
def eval_between(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for i in range(3):
        epoch(s, opt)
        s.model.eval()
        with torch.no_grad():
            s.note(f"out{i}", s.model(whole(s)).clone())
        s.model.train()
    return s.end()


@row(LOOPS, "evaluation after training of the held-out rows: `loader.eval_batches()`")
def eval_batches(es: Any) -> Result:
    s = Script(es, loader={"split": "75/25"})
    opt = s.sgd()
    loader = s.loader()
    for batch in s.job.steps(loader):
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    with s.job.eval(s.model):
        s.note("out", torch.cat([s.model(b) for b in loader.eval_batches(8)]))
    return s.end()


@row(LOOPS, "the evaluation's gradients: `torch.enable_grad` and `autograd.grad` of inputs in the middle")
def saliency(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    x = whole(s)["x"].requires_grad_()
    (slope,) = torch.autograd.grad(s.model({**whole(s), "x": x}).sum(), x)
    s.note("slope", slope)
    return s.end()


@row(LOOPS, "early stopping: `break` after 10 steps", stated=BROKEN)
def break_early(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        if s.job.step == 9:
            break
    return s.end()


@row(LOOPS, "early stopping between epochs by a validation loss")
def stop_by_loss(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    best, bad = float("inf"), 0
    for _ in range(8):
        epoch(s, opt)
        with s.job.eval(s.model):
            loss = float(nn.functional.mse_loss(s.model(whole(s)), whole(s)["y"]))
        bad = 0 if loss < 0.8 * best else bad + 1
        best = min(best, loss)
        if bad >= 1:
            break
    s.note("best", best)
    return s.end()


@row(LOOPS, "the best weights kept by `copy.deepcopy(state_dict())` and loaded at the end of an epoch")
def best_kept(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.1)
    best, kept = float("inf"), None
    for _ in range(4):
        epoch(s, opt)
        with s.job.eval(s.model):
            loss = float(nn.functional.mse_loss(s.model(whole(s)), whole(s)["y"]))
        if loss < best:
            best, kept = loss, {k: v.detach().clone() for k, v in s.job.state_dict()["models"][0].items()}
    assert kept is not None
    return {k: np.asarray(v) for k, v in kept.items()} | {"best": np.asarray(best)}


@row(LOOPS, "`itertools.islice(job.steps(...), 10)`", stated=COUNTED)
def islice(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in itertools.islice(s.batches(), 10):
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(LOOPS, "`next(iter(job.steps(...)))`: one batch to look at, before the loop")
def peek(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    first = s.loader().read(0, 0, 8)
    s.note("peek", first["x"])
    epoch(s, opt)
    return s.end()


@row(LOOPS, "an exception caught inside of the iteration; the batch is left out")
def caught(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        try:
            if s.job.step % 4 == 2:
                raise ValueError("a bad batch")
            s.loss(batch).backward()
            opt.step()
        except ValueError:
            pass
    return s.end()


@row(LOOPS, "`torch.save(model.state_dict())` at the chief after training, loaded by plain PyTorch")
def saved(es: Any) -> Result:
    s = Script(es)
    epoch(s, s.sgd())
    state = s.job.state_dict()["models"][0]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(state, path)
        net = Net()
        net.load_state_dict(torch.load(path, weights_only=True))
    return {k: v.detach().numpy() for k, v in net.state_dict().items()}


@row(LOOPS, "`torch.save` in the middle of training")
def saved_in_loop(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    states = []
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        if s.job.step == 5:
            states.append({k: v.detach().clone() for k, v in s.model.state_dict().items()})
    out = s.end()
    for k, v in states[-1].items():
        out[f"each.{k}"] = kit.whole(v).numpy()
    return out


@row(LOOPS, "weights loaded before training (`model.load_state_dict`)")
def loaded(es: Any) -> Result:
    s = Script(es)
    values = {k: torch.full_like(v, 0.1) for k, v in Net().state_dict().items()}
    if getattr(s.job, "processes_per_worker", 1) > 1:
        raise_shard(s)
    s.model.load_state_dict(values)
    epoch(s, s.sgd())
    return s.end()


def raise_shard(s: Script) -> None:
    """A sharded model is loaded before ``fully_shard``: what a script does there."""
    from everstep.errors import ScriptError

    try:
        s.job.load_state_dict({"models": [{}]})
    except ScriptError as error:
        raise error from None


@row(LOOPS, "metrics: a running mean of the loss, reported")
def metrics(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    total, n = 0.0, 0
    for batch in s.batches():
        opt.zero_grad()
        loss = s.loss(batch)
        loss.backward()
        opt.step()
        total, n = total + loss.item() * len(batch["y"]), n + len(batch["y"])
        s.job.report(loss=total / n)
    s.note("each.mean", total / n)
    return s.end()


@row(LOOPS, "`model.train()` and `model.eval()` switched for single steps")
def train_eval(es: Any) -> Result:
    s = Script(es, lambda: Net(nn.Sequential(nn.LayerNorm(8))))
    opt = s.sgd()
    for batch in s.batches():
        s.model.train(s.job.step % 2 == 0)
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(LOOPS, "`job.step` in each iteration")
def job_step(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        s.each("step", torch.tensor(s.job.step))
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(LOOPS, "a gradient that is not finite in one batch")
def not_finite(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        loss = s.loss(batch)
        (loss * float("nan") if s.job.step == 4 else loss).backward()
        opt.step()
    return s.end()
