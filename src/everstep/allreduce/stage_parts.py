"""Puts the states of a model's stages together: the same state as one process with all of the model would pack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from everstep.allreduce.serialize import Packer, SerializedState, Unpacker
from everstep.errors import ScriptError
from everstep.model.group import Position

TRAINABLE: Final = "trainable"


class WholeModel:
    """Says what the whole model has: names of parameters and buffers, in its order. Filled by ``job.pipeline``."""

    def __init__(self) -> None:
        self.parameters: list[str] = []
        self.buffers: list[str] = []

    def order(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.parameters)}


def joined(
    parts: Sequence[SerializedState], whole: WholeModel, position: Position, loop: int, into: torch.Tensor | None = None
) -> SerializedState:
    """Return the state of the whole model, as one process with all of it would pack it. Raises ScriptError where what
    the stages have in common differs."""
    sources = [Unpacker(part, f"the state of stage {stage}") for stage, part in enumerate(parts)]
    packer = Packer()
    order = whole.order()
    parameters = _named((s, s.header.parameters) for s in sources)
    buffers = _named((s, s.header.buffers) for s in sources)
    gradients = _named((s, s.header.gradients) for s in sources)
    trees: dict[str, Any] = {}
    first = sources[0]
    numbers = tuple(packer.tensor(name, parameters[name]) for name in whole.parameters if name in parameters)
    held = tuple(packer.tensor(name, buffers[name]) for name in whole.buffers if name in buffers)
    kept = tuple(
        packer.tensor(f"{name}.grad", gradients[f"{name}.grad"])
        for name in whole.parameters
        if f"{name}.grad" in gradients
    )
    for name in first.header.trees:
        if name.startswith("optimizer"):
            trees[name] = _joined_optimizer(packer, name, sources, order)
        elif name == TRAINABLE:
            both = [s.header.trees[TRAINABLE] for s in sources]
            trees[name] = [
                sorted({n for frozen, _ in both for n in frozen}, key=lambda n: order.get(n, 0)),
                sorted({n for _, reserve in both for n in reserve}),
            ]
        elif not name.startswith("extra."):
            values = [s.value(s.header.trees[name]) for s in sources]
            if any(not same(value, values[0]) for value in values):
                raise ScriptError(
                    f"{name.removeprefix('tracked.')!r} of job.track differs between the stages: what it holds must "
                    "be the same in all processes of a worker (no tensors of the model, no count of its own)"
                )
            trees[name] = packer.tree(name, values[0])
    for source in sources:
        for name, tree in source.header.trees.items():
            if name.startswith("extra."):
                trees.setdefault(name, packer.tree(name, source.value(tree)))
    header = packer.header(position, loop, trees, parameters=numbers, buffers=held, gradients=kept)
    return packer.finish(header, "the training state", into)


def _named(found: Iterable[tuple[Unpacker, Sequence[int]]]) -> dict[str, torch.Tensor]:
    return {source.name(n): source.view(n) for source, numbers in found for n in numbers}


def _joined_optimizer(
    packer: Packer, what: str, sources: Sequence[Unpacker], order: Mapping[str, int]
) -> dict[str, Any]:
    trees = [source.header.trees[what] for source in sources]
    counts = [len(tree["groups"]) for tree in trees]
    if len(set(counts)) > 1:
        raise ScriptError(
            f"optimizer {what.removeprefix('optimizer')} has {counts[0]} groups of parameters in stage 0 and others "
            f"have {', '.join(map(str, sorted(set(counts) - {counts[0]})))}: make the same groups in all stages; one "
            "may be empty in some"
        )
    groups = []
    for number in range(counts[0]):
        values = [s.value(tree["groups"][number]["values"]) for s, tree in zip(sources, trees, strict=True)]
        if any(not same(value, values[0]) for value in values):
            raise ScriptError(
                f"group {number} of optimizer {what.removeprefix('optimizer')} differs between the stages (learning "
                "rate, ...): set what is the same in all processes of a worker"
            )
        names = [name for tree in trees for name in tree["groups"][number]["names"]]
        groups.append(
            {"names": sorted(names, key=lambda name: order.get(name, -1)), "values": packer.tree(what, values[0])}
        )
    states = {name: (s, tree) for s, t in zip(sources, trees, strict=True) for name, tree in t["state"]}
    found = {
        name: packer.tree(f"{what}.{name}", states[name][0].value(states[name][1]))
        for group in groups
        for name in group["names"]
        if name in states
    }
    out = [[name, found[name]] for name in sorted(found, key=lambda name: order.get(name, -1))]
    other = [[key, packer.tree(f"{what}.{key}", sources[0].value(value))] for key, value in trees[0]["other"]]
    return {"groups": groups, "state": out, "other": other}


def same(a: Any, b: Any) -> bool:
    """Return whether two values of a ``state_dict`` are equal, bit for bit where they are tensors."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)
