"""A layout that is kept from copy to copy gives what a state described anew gives, or says that it does not fit."""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.state import ReplicaState
from everstep.model.group import Position
from everstep.pipeline.state_layout import StateLayout

torch.set_num_threads(1)


class Script:
    """What a script has: a model with a buffer and a small parameter, an optimizer that has stepped, a scheduler."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))
        self.model.register_buffer("seen", torch.zeros(3))
        self.opt = optimizer(self.model.parameters(), lr=0.1)
        self.rate = torch.optim.lr_scheduler.StepLR(self.opt, 3)
        self.tracked: dict[str, Any] = {"rate": self.rate}
        self.state = ReplicaState([self.model], [self.opt], self.tracked)
        self.step()

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        self.opt.step()

    def truth(self) -> SerializedState:
        return self.state._serialized(Position(), 0, None)


def copied(layout: StateLayout) -> SerializedState:
    """The state by the layout's addresses."""
    layout.capture()
    body = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for address, at, size in zip(layout.addresses, layout.places, layout.sizes, strict=True):
        ctypes.memmove(body.data_ptr() + int(at), int(address), int(size))
    return SerializedState(layout.text, body)


def equal(a: SerializedState, b: SerializedState) -> bool:
    return a.header == b.header and torch.equal(a.body, b.body)


def _replace(s: Script) -> None:
    s.model[1] = nn.Linear(40, 3)
    s.opt.param_groups[0]["params"][2:] = list(s.model[1].parameters())
    for p in list(s.opt.state)[2:]:
        del s.opt.state[p]


VALUES: dict[str, Callable[[Script], None]] = {
    "a step": Script.step,
    "a schedule": lambda s: s.rate.step(),
    "a learning rate": lambda s: s.opt.param_groups[0].update(lr=0.3),
    "a buffer's values": lambda s: s.model.seen.add_(1),
    "a small parameter, unseen": lambda s: s.model[1].bias.data.add_(1),
    "large parameters, unseen": lambda s: s.model[0].weight.data.add_(1),
}
"""What a layout follows."""

SHAPES: dict[str, Callable[[Script], None]] = {
    "another buffer": lambda s: setattr(s.model, "seen", torch.ones(3)),
    "one more buffer": lambda s: s.model.register_buffer("more", torch.ones(2)),
    "one more part": lambda s: s.model.add_module("more", nn.Linear(2, 2)),
    "another part": _replace,
    "a frozen parameter": lambda s: s.model[0].weight.requires_grad_(False),
    "other memory": lambda s: setattr(s.model[0].weight, "data", torch.ones(40, 40)),
    "another shape": lambda s: setattr(s.model[1].weight, "data", s.model[1].weight.data.view(40, 3)),
    "no state": lambda s: s.opt.state.clear(),
    "a loaded state": lambda s: s.opt.load_state_dict(copy.deepcopy(s.opt.state_dict())),
    "another momentum": lambda s: s.opt.state[s.model[0].weight].update(exp_avg=torch.ones(40, 40)),
    "one more fact": lambda s: s.opt.state[s.model[0].weight].update(note=1),
    "one more group": lambda s: s.opt.add_param_group({"params": [nn.Parameter(torch.ones(5))]}),
    "a tracked object": lambda s: s.tracked.update(more=torch.optim.lr_scheduler.StepLR(s.opt, 5)),
    "a reserve": lambda s: s.state.reserve.add("0.weight"),
    "carried gradients": lambda s: setattr(s.state, "carried", True),
}
"""What a layout does not fit behind."""


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
def test_what_has_no_other_tensors_is_followed(change: Callable[[Script], None]) -> None:
    script = Script()
    layout = StateLayout(script.state)
    assert equal(copied(layout), script.truth())
    change(script)
    assert layout.follows(script.state)
    found = copied(layout)
    assert layout.check(script.state) and not layout.changed and equal(found, script.truth())


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_what_has_other_tensors_is_not_taken_for_the_same(change: Callable[[Script], None]) -> None:
    script = Script()
    layout = StateLayout(script.state)
    change(script)
    assert not (layout.follows(script.state) and layout.check(script.state))
    assert equal(copied(StateLayout(script.state)), script.truth())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_script_does_what_fits_is_right(seed: int) -> None:
    draws, script = random.Random(seed), Script()
    layout = StateLayout(script.state)
    every = [*VALUES.values()] * 3 + [*SHAPES.values()]
    for _ in range(6):
        try:
            draws.choice(every)(script)
        except (KeyError, RuntimeError):
            continue  # (the part or the shape is another one already)
        follows = layout.follows(script.state)
        found = copied(layout)
        if not follows or not layout.check(script.state):
            layout = StateLayout(script.state)
            found = copied(layout)
        assert equal(found, script.truth())


@pytest.mark.parametrize("change", ["weight", "momentum", "small momentum"])
def test_what_is_changed_before_the_optimizer_steps_is_seen(change: str) -> None:
    script = Script()
    layout = StateLayout(script.state)
    layout.capture()
    assert not layout.changed
    kept = script.opt.state[script.model[1].bias if change == "small momentum" else script.model[0].weight]
    with torch.no_grad():
        (script.model[0].weight if change == "weight" else kept["exp_avg"]).add_(1)
    assert layout.changed


def test_an_optimizer_that_keeps_lists_is_described_each_time() -> None:
    script = Script()
    kept = script.opt.state[script.model[0].weight] = {"old": [torch.ones(3)]}
    layout = StateLayout(script.state)
    assert not layout.follows(script.state) and kept


def test_a_learning_rate_that_is_a_tensor_is_described_each_time() -> None:
    script = Script()
    script.opt.param_groups[0]["lr"] = torch.tensor(0.1)
    assert not StateLayout(script.state).follows(script.state)
