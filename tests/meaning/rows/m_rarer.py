"""Rarer things that scripts do with optimizers, parameters and modules in the loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from meaning.kit import DIM, KEYS, Net, Script
from meaning.table import Result, row, topic

RARER = topic("Rarer things")


def train(s: Script, opt: Any, before: Any = lambda i: None, after: Any = lambda i: None) -> Result:
    for i, batch in enumerate(s.batches()):
        before(i)
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        after(i)
    return s.end()


@row(RARER, "an optimizer's saved state is loaded in the loop (`opt.load_state_dict`)")
def optimizer_loaded(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.of(torch.optim.Adam(s.model.parameters(), lr=0.02))
    kept: dict[int, Any] = {}

    def before(i: int) -> None:
        if s.job.step == 3 and not kept:
            kept[3] = copy.deepcopy(opt.state_dict())
        if s.job.step == 7 and 7 not in kept:
            kept[7] = True
            opt.load_state_dict(kept[3])

    return train(s, opt, before)


@row(RARER, "an optimizer's options are loaded in the loop (a state without momenta)")
def options_loaded(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd()

    def before(i: int) -> None:
        state = opt.state_dict()
        state["param_groups"][0]["lr"] = 0.02 if s.job.step >= 5 else 0.1
        opt.load_state_dict(state)

    return train(s, opt, before)


@row(RARER, "a table's weight is another parameter in the loop (`emb.weight = nn.Parameter(...)`)")
def weight_replaced(es: Any) -> Result:
    s = Script(es)

    def before(i: int) -> None:
        if s.job.step == 4:
            s.model.emb.weight = nn.Parameter(torch.full((KEYS, DIM), 0.5))

    return train(s, s.sgd(), before)


@row(RARER, "a table's weight is given other memory in the loop (`weight.set_`)")
def weight_set(es: Any) -> Result:
    s = Script(es)

    def before(i: int) -> None:
        if s.job.step == 4:
            with torch.no_grad():
                s.model.emb.weight.set_(torch.full(tuple(s.model.emb.weight.shape), 0.5))

    return train(s, s.sgd(), before)


@row(RARER, "the first lookup of a table is changed in place (`x = emb(ids); x += 1`), and there are others")
def lookup_in_place(es: Any) -> Result:
    class Places(Net):
        def _hidden(self, batch: dict[str, Tensor]) -> Tensor:
            one = self.emb(batch["ids"][:, 0])
            one *= 2
            one += batch["x"]
            two = self.emb(batch["ids"][:, 1]) + self.emb(batch["ids"][:, 2])
            x = torch.cat([one, two * one, batch["x"]], 1)
            out: Tensor = torch.tanh(self.middle(self.first(x)))
            return out

    return train(s := Script(es, Places), s.sgd())


@row(RARER, "the first lookup of a table goes into nothing, a later one into the loss")
def first_lookup_unused(es: Any) -> Result:
    class Unused(Net):
        def _hidden(self, batch: dict[str, Tensor]) -> Tensor:
            self.emb(batch["ids"][:, 1]).retain_grad()
            out: Tensor = super()._hidden(batch)
            return out

    return train(s := Script(es, Unused), s.sgd())


@row(RARER, "a hook on what a lookup gave")
def lookup_hooked(es: Any) -> Result:
    class Hooked(Net):
        def _hidden(self, batch: dict[str, Tensor]) -> Tensor:
            one = self.emb(batch["ids"][:, 0])
            one.register_hook(lambda grad: grad * 0.5)
            x = torch.cat([one, self.bag(batch["ids"][:, 1:]) + self.emb(batch["ids"][:, 1]), batch["x"]], 1)
            out: Tensor = torch.tanh(self.middle(self.first(x)))
            return out

    return train(s := Script(es, Hooked), s.sgd())


@row(RARER, "the order of parameters in the optimizer is another than in the model")
def order_of_parameters(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.of(torch.optim.Adam(list(s.model.parameters())[::-1], lr=0.02)))


@row(RARER, "an option of the optimizer changes in the loop (`group['weight_decay'] = ...`)")
def decay_in_the_loop(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.of(torch.optim.AdamW(s.model.parameters(), lr=0.02, weight_decay=0.0))

    def before(i: int) -> None:
        opt.param_groups[0]["weight_decay"] = 0.3 if s.job.step >= 5 else 0.0

    return train(s, opt, before)


@row(RARER, "dense weights scaled after `step` through `parameters_to_vector` and `vector_to_parameters`")
def as_a_vector(es: Any) -> Result:
    s = Script(es)

    def after(i: int) -> None:
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(s.model.dense())
            nn.utils.vector_to_parameters(vector * 0.99, s.model.dense())

    return train(s, s.sgd(), after=after)
