"""Gradients between backward and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meaning.kit import DIM, Net, Script, as_it_lies, mine, whole
from meaning.rows.a_steps import OWN_GRADIENT
from meaning.table import Result, row, topic

GRADS = topic("Gradients: clipped, edited, watched")
PARTS = "sync elastic fixed logical logical-2 passes hybrid-2 shard"
DRAWN = {"logical passes": "What stands behind `backward` is drawn in each pass; only the last one's counts."}
PENALTY = {PARTS: "A penalty of gradients is one of each part of a step, as with DDP."}
OF_ROWS = {
    "alone async bounded sync hybrid hybrid-2": "Of so large a table `weight` has the rows of the batch: a penalty "
    "of it is one of these rows."
}
HOOKED = {PARTS: "A hook sees the gradient of one worker's batch, or of one pass: a clip there is of that part."}


def train(s: Script, opt: Any, between: Any) -> Result:
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        between()
        opt.step()
    return s.end()


@row(GRADS, "`clip_grad_norm_(model.parameters(), 0.5)`", stated=OWN_GRADIENT)
def clip_norm(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(), lambda: nn.utils.clip_grad_norm_(s.model.parameters(), 0.5))


@row(GRADS, "`clip_grad_norm_` of the dense part alone", stated=OWN_GRADIENT)
def clip_norm_dense(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(), lambda: nn.utils.clip_grad_norm_(s.model.dense(), 0.5))


@row(GRADS, "`clip_grad_norm_` with the infinity norm", stated=OWN_GRADIENT)
def clip_norm_inf(es: Any) -> Result:
    s = Script(es)

    def clip() -> None:
        params = list(s.model.parameters())
        if getattr(s.job, "processes_per_worker", 1) > 1:  # torch: no infinity norm of an empty part
            norm = torch.stack([whole(p.grad).abs().max() for p in params]).max()
            torch.nn.utils.clip_grads_with_norm_(params, 0.1, norm)
        else:
            nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf"))

    return train(s, s.sgd(), clip)


@row(GRADS, "`clip_grad_norm_`, its result reported", stated=OWN_GRADIENT)
def clip_norm_result(es: Any) -> Result:
    s = Script(es)

    def clip() -> None:
        norm = nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        s.job.report(norm=norm)
        s.each("norm", norm.detach().clone())

    return train(s, s.sgd(), clip)


@row(GRADS, "`clip_grad_value_`", stated=OWN_GRADIENT)
def clip_value(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(), lambda: nn.utils.clip_grad_value_(s.model.parameters(), 0.05))


@row(GRADS, "gradients scaled in place")
def scaled(es: Any) -> Result:
    s = Script(es)

    def scale() -> None:
        for p in s.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    return train(s, s.sgd(), scale)


@row(GRADS, "gradients assigned: `p.grad = p.grad.sign()`", stated=OWN_GRADIENT)
def signs(es: Any) -> Result:
    s = Script(es)

    def assign() -> None:
        for p in s.model.parameters():
            if p.grad is not None:
                p.grad = p.grad.sign()

    return train(s, s.sgd(0.003), assign)


@row(GRADS, "the gradient of one layer set to None before `step`")
def one_dropped(es: Any) -> Result:
    s = Script(es)

    def drop() -> None:
        s.model.first.weight.grad = None

    return train(s, s.sgd(weight_decay=0.1), drop)


@row(GRADS, "the gradient of a table set to None before `step`")
def table_dropped(es: Any) -> Result:
    s = Script(es)

    def drop() -> None:
        s.model.emb.weight.grad = None

    return train(s, s.sgd(), drop)


@row(GRADS, "some elements of a gradient set to zero (a mask)")
def masked(es: Any) -> Result:
    s = Script(es)

    def mask() -> None:
        mine(s.model.first.weight.grad)[:, ::2] = 0
        mine(s.model.emb.weight.grad)[:, 0] = 0

    return train(s, s.sgd(), mask)


@row(GRADS, "L2 of the dense weights added to their gradients by hand")
def decay_by_hand(es: Any) -> Result:
    s = Script(es)

    def decay() -> None:
        with torch.no_grad():
            for p in s.model.dense():
                p.grad.add_(p, alpha=0.05)

    return train(s, s.sgd(), decay)


@row(
    GRADS,
    "noise from a generator of its own added to gradients (differential privacy)",
    stated={"logical passes": "What stands behind `backward` is drawn in each pass; only the last one's counts."},
)
def noise(es: Any) -> Result:
    s = Script(es)
    generator = torch.Generator().manual_seed(7)

    def add() -> None:
        for p in s.model.dense():
            p.grad.add_(as_it_lies(0.1 * torch.randn(p.shape, generator=generator), p))

    return train(s, s.sgd(), add)


@row(GRADS, "gradient centralization of the dense part")
def centralized(es: Any) -> Result:
    s = Script(es)

    def centre() -> None:
        for p in s.model.dense():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    return train(s, s.sgd(), centre)


@row(GRADS, "a hook on a dense parameter: `p.register_hook`")
def parameter_hook(es: Any) -> Result:
    s = Script(es)
    s.model.first.weight.register_hook(lambda g: g * 0.5)
    return train(s, s.sgd(), lambda: None)


@row(GRADS, "a hook on a table's weight")
def table_hook(es: Any) -> Result:
    s = Script(es)
    s.model.emb.weight.register_hook(lambda g: g * 0.5)
    return train(s, s.sgd(), lambda: None)


@row(GRADS, "`register_post_accumulate_grad_hook` that clips each gradient as it comes", stated=HOOKED)
def post_accumulate(es: Any) -> Result:
    s = Script(es)

    def clip(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(-0.05, 0.05)

    for p in s.model.dense():
        p.register_post_accumulate_grad_hook(clip)
    return train(s, s.sgd(), lambda: None)


@row(GRADS, "a hook on a tensor of the graph (`h.register_hook`)", stated=HOOKED)
def tensor_hook(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        h = s.model.hidden(batch)
        h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        nn.functional.mse_loss(s.model.last(h), batch["y"]).backward()
        opt.step()
    return s.end()


@row(GRADS, "a hook on the rows that an embedding gave")
def lookup_hook(es: Any) -> Result:
    s = Script(es)
    s.model.emb.register_forward_hook(lambda m, args, out: out.register_hook(lambda g: g * 0.25) and None)
    return train(s, s.sgd(), lambda: None)


@row(GRADS, "module hooks: forward hook that changes the output, full backward hook that scales")
def module_hooks(es: Any) -> Result:
    s = Script(es)
    s.model.first.register_forward_hook(lambda m, args, out: out * 0.5)
    s.model.last.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 0.5 for g in gi))
    return train(s, s.sgd(), lambda: None)


@row(GRADS, "an optimizer's `register_step_pre_hook` and `register_step_post_hook`")
def optimizer_hooks(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    calls: list[int] = []

    def before(*_: Any) -> None:
        for p in s.model.dense():
            p.grad.mul_(0.5)

    opt.register_step_pre_hook(before)
    opt.register_step_post_hook(lambda *_: calls.append(1))
    out = train(s, opt, lambda: None)
    assert calls
    return out


@row(GRADS, "a penalty: L2 of all parameters in the loss")
def l2_all(es: Any) -> Result:
    s = Script(es, table="sgd")
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        (s.loss(batch) + 0.01 * sum(p.square().sum() for p in s.model.dense())).backward()
        opt.step()
    return s.end()


@row(GRADS, "a penalty: L2 of the dense parameters, computed before the model's forward")
def l2_before(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        penalty = sum(p.square().sum() for p in s.model.dense())
        (s.loss(batch) + 0.01 * penalty).backward()
        opt.step()
    return s.end()


@row(GRADS, "the same in a method of the model (`register_fsdp_forward_method` where it is sharded)")
def l2_method(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        penalty = s.model.penalty()
        (s.loss(batch) + 0.01 * penalty).backward()
        opt.step()
    return s.end()


@row(GRADS, "a penalty: L2 of the rows that were looked up, in the loss")
def l2_rows(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        (s.loss(batch) + 0.1 * s.model.emb(batch["ids"][:, 0]).square().mean()).backward()
        opt.step()
    return s.end()


@row(GRADS, "a penalty: L2 over a table's whole weight in the loss (DeepCTR's `l2_reg_embedding`)")
def l2_table(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        (s.loss(batch) + 0.01 * s.model.emb.weight.square().sum()).backward()
        opt.step()
    return s.end()


@row(GRADS, "the same of a table of more than 65,536 numbers", stated=OF_ROWS)
def l2_table_large(es: Any) -> Result:
    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20_000, DIM)

    s = Script(es, Large)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        (s.loss(batch) + 0.01 * s.model.emb.weight.square().sum()).backward()
        opt.step()
    return s.end()


@row(GRADS, "L1 of activations in the loss")
def l1_activations(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        h = s.model.hidden(batch)
        (nn.functional.mse_loss(s.model.last(h), batch["y"]) + 0.1 * h.abs().mean()).backward()
        opt.step()
    return s.end()


@row(
    GRADS,
    "a gradient penalty: `autograd.grad(..., create_graph=True)` in the loss",
    stated={PARTS: "A penalty of gradients is one of each part of a step, as with DDP."},
)
def gradient_penalty(es: Any) -> Result:
    s = Script(es)
    if getattr(s.job, "processes_per_worker", 1) > 1:  # the second pass over the graph needs the whole parameters, too
        s.model.set_reshard_after_backward(False)
    opt = s.sgd(0.05)
    for batch in s.batches():
        opt.zero_grad()
        x = batch["x"].clone().requires_grad_()
        loss = s.loss({**batch, "x": x})
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        opt.step()
    return s.end()


@row(GRADS, "the norm of gradients read by the script after `backward` (a log)")
def norms_read(es: Any) -> Result:
    s = Script(es)

    def look() -> None:
        s.each("norms", torch.stack([whole(p.grad).norm() for p in s.model.dense()]))

    return train(s, s.sgd(), look)


@row(GRADS, "a table's gradient read by the script after `backward`")
def table_norm_read(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(), lambda: s.each("norm", s.model.emb.weight.grad.norm()))
