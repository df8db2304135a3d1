"""The state of a model in stages is that of the model in one process, bit for bit, and comes apart again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from everstep.allreduce.replica_group import Unit
from everstep.allreduce.serialize import SerializedState, decode_header
from everstep.allreduce.stage_parts import WholeModel, joined
from everstep.allreduce.state import ReplicaState
from everstep.errors import CheckpointError, ScriptError
from everstep.model.group import Position
from everstep.pipeline.stages_state import StagesState, digest_of, named_digests


class StageOf(nn.Module):
    """Has some modules of a model, by their names there."""

    def __init__(self, net: nn.Sequential, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, net[int(name)])


def net() -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    made[2].register_buffer("seen", torch.arange(3.0))
    return made


class OnePart:
    """One process: its model, optimizer, scheduler and state."""

    def __init__(self, model: nn.Module, whole: WholeModel | None, steps: int = 3) -> None:
        groups = [{"params": []}, {"params": [], "lr": 0.1}]
        for p in model.parameters():
            groups[p.dim() == 1]["params"].append(p)  # type: ignore[attr-defined]
        self.model = model
        self.opt = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 2)
        for number in range(steps):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5 + number)
            self.opt.step()
            self.scheduler.step()
        tracked = {"scheduler": self.scheduler}
        if whole is None:
            self.state: ReplicaState = ReplicaState([model], [self.opt], tracked)
        else:
            self.state = StagesState([model], [self.opt], tracked, Unit(1, 2, []), whole)


def whole_of(model: nn.Module) -> WholeModel:
    whole = WholeModel()
    whole.parameters = [name for name, _ in model.named_parameters()]
    whole.buffers = [name for name, _ in model.named_buffers()]
    return whole


def stages(divided: list[list[str]], steps: int = 3) -> tuple[list[OnePart], WholeModel]:
    whole = whole_of(net())
    return [OnePart(StageOf(net(), names), whole, steps) for names in divided], whole


def serialized(part: OnePart, carried: bool) -> SerializedState:
    part.state.carried = carried
    return ReplicaState.snapshot(part.state)


@pytest.mark.parametrize("carried", [False, True], ids=["cleared", "carried"])
@pytest.mark.parametrize("divided", [[["0", "1"], ["2", "3"]], [["0", "3"], ["1", "2"]], [["0"], ["1", "2"], ["3"]]])
def test_the_parts_together_are_the_state_of_the_whole(divided: list[list[str]], carried: bool) -> None:
    parts, whole = stages(divided)
    alone = OnePart(net(), None)
    alone.state.carried = carried
    alone.state.position, alone.state.loop = Position(7, 0, 1, 20), 2
    mine = joined([serialized(part, carried) for part in parts], whole, alone.state.position, 2)
    theirs = alone.state.snapshot()
    assert decode_header(mine.header, "mine") == decode_header(theirs.header, "theirs")
    assert mine.header == theirs.header and torch.equal(mine.body, theirs.body)
    assert (
        digest_of(joined([serialized(part, carried) for part in parts], whole, Position(), 0)) == alone.state.digest()
    )
    assert named_digests(mine) == alone.state.parameter_digests()


@pytest.mark.parametrize("divided", [[["0", "1"], ["2", "3"]], [["0", "3"], ["1", "2"]]])
def test_a_whole_state_comes_apart_in_any_other_way(divided: list[list[str]]) -> None:
    theirs = OnePart(net(), None, steps=5)
    theirs.state.position, theirs.state.loop = Position(7, 0, 1, 20), 2
    whole = theirs.state.snapshot()
    parts, model = stages(divided, steps=1)
    for part in parts:
        part.state.load(whole, "checkpoint 3")
        assert part.state.position == theirs.state.position and part.state.loop == 2
        assert part.scheduler.state_dict() == theirs.scheduler.state_dict()
    again = joined([serialized(part, False) for part in parts], model, theirs.state.position, 2)
    assert again.header == whole.header and torch.equal(again.body, whole.body)


def test_a_state_that_lacks_a_stage_or_has_another_is_refused() -> None:
    parts, _ = stages([["0", "1"], ["2", "3"]])
    lacking = serialized(OnePart(StageOf(net(), ["0", "1", "2"]), None), False)
    with pytest.raises(CheckpointError, match=r"checkpoint 3 has no parameter '3\.bias' of this model"):
        parts[0].state.load(lacking, "checkpoint 3")
    more = serialized(OnePart(nn.Sequential(*net(), nn.Linear(2, 2)), None), False)
    with pytest.raises(CheckpointError, match=r"has parameter '4\.bias', which this model does not have"):
        parts[1].state.load(more, "checkpoint 3")


def changed(part: SerializedState, change: Any) -> SerializedState:
    header = decode_header(part.header, "a part")
    change(header.trees)
    return SerializedState(msgspec.msgpack.encode(header), part.body)


def test_what_the_stages_have_in_common_must_be_the_same() -> None:
    parts, whole = stages([["0", "1"], ["2", "3"]])
    first, second = (serialized(part, False) for part in parts)
    parts[1].opt.param_groups[0]["lr"] = 0.5
    with pytest.raises(ScriptError, match="group 0 of optimizer 0 differs between the stages"):
        joined([first, serialized(parts[1], False)], whole, Position(), 0)
    parts[1].scheduler.step()
    parts[1].opt.param_groups[0]["lr"] = parts[0].opt.param_groups[0]["lr"]
    parts[1].opt.param_groups[1]["lr"] = parts[0].opt.param_groups[1]["lr"]
    with pytest.raises(ScriptError, match=r"'scheduler' of job\.track differs between the stages"):
        joined([first, serialized(parts[1], False)], whole, Position(), 0)
    fewer = changed(second, lambda trees: trees["optimizer0"]["groups"].pop())
    with pytest.raises(ScriptError, match="has 2 groups of parameters in stage 0 and others have 1"):
        joined([first, fewer], whole, Position(), 0)
