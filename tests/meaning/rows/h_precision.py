"""Mixed precision, dtypes, checkpointing, compilers, torch.func."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meaning.kit import Net, Script
from meaning.rows.a_steps import OWN_GRADIENT
from meaning.table import Result, row, topic

PRECISION = topic("Precision, checkpointing, compilers")


def train(s: Script, opt: Any) -> Result:
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(PRECISION, "autocast to bfloat16", rtol=1e-2, atol=5e-3)
def autocast(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = s.loss(batch)
        loss.backward()
        opt.step()
    return s.end()


@row(PRECISION, "GradScaler: scale, `scaler.step`, `update`")
def scaler(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    s.job.track(scaler=scaler)
    for batch in s.batches():
        opt.zero_grad()
        scaler.scale(s.loss(batch)).backward()
        scaler.step(opt)
        scaler.update()
    return s.end()


@row(PRECISION, "GradScaler with `unscale_` and clipping", stated=OWN_GRADIENT)
def scaler_clipped(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    s.job.track(scaler=scaler)
    for batch in s.batches():
        opt.zero_grad()
        scaler.scale(s.loss(batch)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
    return s.end()


@row(PRECISION, "GradScaler that skips a step: an infinite gradient in one batch")
def scaler_skips(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    s.job.track(scaler=scaler)
    for batch in s.batches():
        opt.zero_grad()
        loss = s.loss(batch)
        if s.job.step == 4:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    s.note("scale", scaler.get_scale())
    return s.end()


@row(PRECISION, "a dense part in float64")
def float64(es: Any) -> Result:
    class Double(Net):
        def __init__(self) -> None:
            super().__init__()
            for part in (self.first, self.last):
                part.double()

        def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            x = torch.cat([self.emb(batch["ids"][:, 0]), self.bag(batch["ids"][:, 1:]), batch["x"]], 1)
            out: torch.Tensor = torch.tanh(self.first(x.double()))
            return out

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = self.last(self._hidden(batch)).float()
            return out

    s = Script(es, Double)
    return train(s, s.sgd())


@row(PRECISION, "a dense part in bfloat16", rtol=1e-1, atol=5e-2)
def bfloat16(es: Any) -> Result:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last.bfloat16()

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = self.last(self._hidden(batch).bfloat16()).float()
            return out

    s = Script(es, Half)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    out = s.job.state_dict()["models"][0]
    return {name: value.detach().float().numpy() for name, value in out.items()}


class Checkpointed(Net):
    reentrant = False

    def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.cat([self.emb(batch["ids"][:, 0]), self.bag(batch["ids"][:, 1:]), batch["x"]], 1)
        out: torch.Tensor = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.reentrant)
        return out


class Reentrant(Checkpointed):
    reentrant = True


class WithTables(Net):
    def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super()._hidden, batch, use_reentrant=False)
        return out


@row(PRECISION, "gradient checkpointing, `use_reentrant=False`")
def checkpointed(es: Any) -> Result:
    s = Script(es, Checkpointed)
    return train(s, s.sgd())


@row(PRECISION, "gradient checkpointing, `use_reentrant=True`")
def checkpointed_reentrant(es: Any) -> Result:
    s = Script(es, Reentrant)
    return train(s, s.sgd())


@row(PRECISION, "gradient checkpointing over the tables' lookups")
def checkpointed_tables(es: Any) -> Result:
    s = Script(es, WithTables)
    return train(s, s.sgd())


def compiled(s: Script, backend: str) -> Result:
    model = torch.compile(s.model, backend=backend)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch, model).backward()
        opt.step()
    return s.end()


@row(PRECISION, "`torch.compile` of the whole model (backend eager)")
def compiled_eager(es: Any) -> Result:
    return compiled(Script(es), "eager")


@row(PRECISION, "`torch.compile` of the whole model (backend aot_eager)")
def compiled_aot(es: Any) -> Result:
    return compiled(Script(es), "aot_eager")


@row(PRECISION, "`torch.compile` of the dense layers alone (`module.compile()`)")
def compiled_part(es: Any) -> Result:
    s = Script(es)
    s.model.first.compile(backend="aot_eager")
    return train(s, s.sgd())


@row(PRECISION, "`torch.func.functional_call` in the loss")
def functional_call(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        h = s.model.hidden(batch)
        out = torch.func.functional_call(s.model.last, dict(s.model.last.named_parameters()), (h,))
        nn.functional.mse_loss(out, batch["y"]).backward()
        opt.step()
    return s.end()


@row(PRECISION, "`torch.func.vmap` in forward")
def vmapped(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        out = torch.func.vmap(s.model.last)(s.model.hidden(batch))
        nn.functional.mse_loss(out, batch["y"]).backward()
        opt.step()
    return s.end()


@row(PRECISION, "`torch.func.grad`, gradients assigned to parameters")
def func_grad(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.1, list(s.model.last.parameters()))
    for batch in s.batches():
        with torch.no_grad():
            h = s.model.hidden(batch)

        def loss_of(params: Any, h: Any = h, y: Any = batch["y"]) -> Any:
            return nn.functional.mse_loss(torch.func.functional_call(s.model.last, params, (h,)), y)

        grads = torch.func.grad(loss_of)({n: p.detach() for n, p in s.model.last.named_parameters()})
        for n, p in s.model.last.named_parameters():
            p.grad = grads[n]
        opt.step()
    return s.end()


@row(PRECISION, "`torch.autograd.set_detect_anomaly(True)`")
def anomaly(es: Any) -> Result:
    s = Script(es)
    with torch.autograd.set_detect_anomaly(True):
        return train(s, s.sgd())


@row(PRECISION, "a custom `autograd.Function`")
def custom_function(es: Any) -> Result:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0]

    class Binary(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Straight.apply(x)  # type: ignore[no-untyped-call]
            return out

    s = Script(es, lambda: Net(Binary()))
    return train(s, s.sgd())
