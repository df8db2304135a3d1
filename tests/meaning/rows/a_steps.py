"""Steps, gradient accumulation, iterations that are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meaning.kit import Net, Script, data, whole
from meaning.table import Result, row, topic

STEPS = topic("Steps and accumulation")


@row(STEPS, "the usual loop: `zero_grad`, `backward`, `step`")
def usual_loop(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "a batch size that does not divide the data")
def ragged_batches(es: Any) -> Result:
    s = Script(es, batch=10, of=data(93))
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "`drop_last=True`")
def drop_last(es: Any) -> Result:
    s = Script(es, batch=10, of=data(93), loader={"drop_last": True})
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "several batches a shard (260 batches an epoch)")
def many_batches(es: Any) -> Result:
    s = Script(es, batch=4, of=data(1040), epochs=1)
    opt = s.sgd(0.02)
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "`zero_grad` after `step`")
def zero_after(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        s.loss(batch).backward()
        opt.step()
        opt.zero_grad()
    return s.end()


@row(STEPS, "`zero_grad` between forward and backward")
def zero_between(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        loss = s.loss(batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return s.end()


@row(STEPS, "`zero_grad(set_to_none=False)`")
def zero_to_zero(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad(set_to_none=False)
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "`model.zero_grad()`")
def model_zero_grad(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        s.model.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "`p.grad = None` for each parameter")
def grads_to_none(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        for p in s.model.parameters():
            p.grad = None
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "gradients never zeroed: each step has the sum of all before")
def never_zeroed(es: Any) -> Result:
    s = Script(es, epochs=1)
    opt = s.sgd(0.003)
    for batch in s.batches():
        s.loss(batch).backward()
        opt.step()
    return s.end()


SEEN = {
    "sync elastic fixed logical logical-2 passes hybrid-2 shard": "A worker sees its own batches: what it counts of "
    "them is not what the job has seen."
}
REST = {
    "sync": "Behind the loop each worker steps with what it has left, which may be of fewer batches than another's."
}
OWN_GRADIENT = {
    "sync": "Until the step each worker has the gradient of its own batch: what the script does to it, or decides by "
    "it, comes before the mean over workers."
}


@row(STEPS, "accumulation over 4 iterations, counted by `enumerate`")
def accumulate(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for i, batch in enumerate(s.batches()):
        (s.loss(batch) / 4).backward()
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
    return s.end()


@row(STEPS, "accumulation over 4 steps, counted by `job.step`")
def accumulate_by_step(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        (s.loss(batch) / 4).backward()
        if s.job.step % 4 == 3:
            opt.step()
            opt.zero_grad()
    return s.end()


@row(STEPS, "accumulation over 5 steps; the last group of an epoch has fewer and steps, too")
def accumulate_last_partial(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    steps = 96 // (8 * es.scale)
    for batch in s.batches():
        (s.loss(batch) / 5).backward()
        at = s.job.step % steps
        if at % 5 == 4 or at == steps - 1:
            opt.step()
            opt.zero_grad()
    return s.end()


@row(
    STEPS,
    "the same with one `job.steps` per epoch, and `step` behind the inner loop for the rest",
    stated=REST,
)
def accumulate_rest_behind_loop(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for _ in range(2):
        i = -1
        for i, batch in enumerate(s.batches(epochs=1)):
            (s.loss(batch) / 5).backward()
            if i % 5 == 4:
                opt.step()
                opt.zero_grad()
        if i % 5 != 4:
            opt.step()
            opt.zero_grad()
    return s.end()


@row(STEPS, "accumulation over 5 steps; what is left at the end is not stepped")
def accumulate_left_over(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        (s.loss(batch) / 5).backward()
        if s.job.step % 5 == 4:
            opt.step()
            opt.zero_grad()
    return s.end()


@row(STEPS, "accumulation with Adam")
def accumulate_adam(es: Any) -> Result:
    s = Script(es)
    opt = s.of(torch.optim.Adam(s.model.parameters(), lr=0.01))
    for batch in s.batches():
        (s.loss(batch) / 3).backward()
        if s.job.step % 3 == 2:
            opt.step()
            opt.zero_grad()
    return s.end()


@row(STEPS, "accumulation by the number of samples seen", stated=SEEN)
def accumulate_by_samples(es: Any) -> Result:
    s = Script(es, batch=10, of=data(93), epochs=1)
    opt = s.sgd()
    seen = 0
    for batch in s.batches():
        seen += len(batch["y"])
        (s.loss(batch) * len(batch["y"]) / 40).backward()
        if seen >= 40:
            opt.step()
            opt.zero_grad()
            seen = 0
    return s.end()


@row(STEPS, "accumulation by `step` every 4th, `zero_grad` every 8th iteration")
def zero_rarer_than_step(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.03)
    for batch in s.batches():
        (s.loss(batch) / 8).backward()
        if s.job.step % 4 == 3:
            opt.step()
        if s.job.step % 8 == 7:
            opt.zero_grad()
    return s.end()


@row(STEPS, "a loop that never steps")
def never_steps(es: Any) -> Result:
    s = Script(es, epochs=1)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
    return s.end()


@row(STEPS, "an iteration left by `continue` before `backward`")
def continue_before_backward(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        if s.job.step % 3 == 1:
            continue
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "an iteration left by `continue` between `backward` and `step`")
def continue_before_step(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        if s.job.step % 3 == 1:
            continue
        opt.step()
    return s.end()


@row(STEPS, "`step` only in every other iteration, the others' gradients dropped")
def every_other(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        if s.job.step % 2 == 0:
            opt.step()
    return s.end()


@row(STEPS, "a spike filter: no `step` where the norm of the gradients is above a bound", stated=OWN_GRADIENT)
def spike_filter(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        norm = sum(float(whole(p.grad).square().sum()) for p in s.model.dense() if p.grad is not None) ** 0.5
        if norm < 3.0:
            opt.step()
    return s.end()


@row(STEPS, "`backward` twice, of two losses")
def two_backwards(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        with s.job.no_sync():
            s.loss(batch).backward()
        (0.1 * s.model(batch).abs().mean()).backward()
        opt.step()
    return s.end()


@row(STEPS, "`backward` twice without `job.no_sync()`")
def two_backwards_bare(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        (0.1 * s.model(batch).abs().mean()).backward()
        opt.step()
    return s.end()


@row(STEPS, "`backward(retain_graph=True)` and a second pass over the same graph")
def retain_graph(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.05)
    for batch in s.batches():
        opt.zero_grad()
        loss = s.loss(batch)
        with s.job.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
    return s.end()


@row(STEPS, "two `step`s in one iteration, each with its own `backward`")
def two_steps(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.05)
    for batch in s.batches():
        for _ in range(2):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
    return s.end()


@row(STEPS, "`step` twice after one `backward`")
def step_twice(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.05)
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        opt.step()
    return s.end()


@row(STEPS, "`torch.autograd.grad`, gradients assigned")
def autograd_grad(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    params = [p for p in s.model.parameters() if p.requires_grad]
    for batch in s.batches():
        grads = torch.autograd.grad(s.loss(batch), params)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        opt.step()
    return s.end()


@row(STEPS, "the loss divided by the number of samples by hand (`reduction='sum'`)")
def sum_loss(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        loss = nn.functional.mse_loss(s.model(batch), batch["y"], reduction="sum") / len(batch["y"])
        loss.backward()
        opt.step()
    return s.end()


@row(STEPS, "a loss that does not depend on some parameters")
def unused_parameters(es: Any) -> Result:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    s = Script(es, Spare)
    opt = s.sgd(weight_decay=0.1)
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(STEPS, "parameters that get a gradient in some iterations only")
def sometimes_used(es: Any) -> Result:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 1)

    s = Script(es, Two)
    opt = s.sgd(momentum=0.9, lr=0.03)
    for batch in s.batches():
        opt.zero_grad()
        head = s.model.last if s.job.step % 2 else s.model.other
        nn.functional.mse_loss(head(s.model.hidden(batch)), batch["y"]).backward()
        opt.step()
    return s.end()
