"""Reads out and puts back the state of a model in stages: the same state, whatever number of processes has it.

The leader of a worker is the one that peers and checkpoints copy from. It asks its followers for their parts, and puts
the whole together in the model's order; who gets a whole one takes what is of its stage."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from everstep.allreduce.leader import UnitState
from everstep.allreduce.replica_group import Part, ReadOut, Unit
from everstep.allreduce.serialize import Packer, SerializedState, Unpacker, decode_header, encode_header
from everstep.allreduce.state import ReplicaState
from everstep.errors import CheckpointError, ScriptError
from everstep.model.group import Position
from everstep.pipeline.guard import unguard

_HALF = 1 << 63
_TRAINABLE = "trainable"


class WholeModel:
    """Says what the whole model has: names of parameters and buffers, in its order. Filled by ``job.pipeline``."""

    def __init__(self) -> None:
        self.parameters: list[str] = []
        self.buffers: list[str] = []

    def order(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.parameters)}


class StagesState(UnitState):
    """Is the state of a worker in stages, in its leader and in its followers. See the top of this file."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
        unit: Unit,
        whole: WholeModel,
    ) -> None:
        super().__init__(models, optimizers, tracked, unit)
        self.whole = whole

    # ------------------------------------------------------------ out

    def snapshot(self, into: torch.Tensor | None = None) -> SerializedState:
        return self._gathered(ReadOut("snapshot"), self.position, self.loop, into)

    def digest(self) -> int:
        """Return it for the whole model. Of the leader at any boundary; followers are asked."""
        serialized = self._gathered(ReadOut("digest"), Position(), 0, None)
        return digest_of(serialized) if self.unit.leads else 0

    def quick_digest(self) -> int:
        """Return it for the worker, in the leader; of the own stage, in a follower."""
        return super().quick_digest() if self.unit.leads else ReplicaState.quick_digest(self)

    def parameter_digests(self) -> dict[str, int]:
        """Return those of the whole model, in the leader."""
        serialized = self._gathered(ReadOut("parameters"), Position(), 0, None)
        return named_digests(serialized) if self.unit.leads else {}

    def together(self) -> SerializedState:
        """Return the state in the leader; an empty one in followers. All processes of the worker have to come here."""
        return self._take_in(Position(), 0, None) if self.unit.leads else self._hand_in()

    def _gathered(self, order: ReadOut, position: Position, loop: int, into: torch.Tensor | None) -> SerializedState:
        if not self.unit.leads:
            return self._hand_in()
        with self.unit.ordered(order):
            return self._take_in(position, loop, into)

    def _mine(self) -> SerializedState:
        unguard(p for model in self.models for p in model.parameters())
        return ReplicaState._serialized(self, Position(), 0, None)

    def _hand_in(self) -> SerializedState:
        mine = self._mine()
        fd = os.memfd_create("everstep-stage", os.MFD_CLOEXEC)
        try:
            size = len(mine.header) + mine.body.numel()
            os.ftruncate(fd, max(size, 1))
            with mmap.mmap(fd, max(size, 1)) as memory:
                memory[: len(mine.header)] = mine.header
                memory[len(mine.header) : size] = mine.body.numpy().data
            self.unit.answer(Part(len(mine.header), mine.body.numel()), fd)
        finally:
            os.close(fd)
        return SerializedState(b"", torch.empty(0, dtype=torch.uint8))

    def _take_in(self, position: Position, loop: int, into: torch.Tensor | None) -> SerializedState:
        parts = [self._mine()]
        for follower in self.unit.followers:
            offered, fd = self.unit.hear_part(follower)
            memory = mmap.mmap(fd, offered.header_bytes + offered.body_bytes, prot=mmap.PROT_READ)
            os.close(fd)
            header = bytes(memory[: offered.header_bytes])
            body = torch.empty(offered.body_bytes, dtype=torch.uint8)
            if offered.body_bytes:
                with memoryview(memory) as view:
                    body.numpy().data[:] = view[offered.header_bytes :]
            memory.close()
            parts.append(SerializedState(header, body))
        return joined(parts, self.whole, position, loop, into)

    # ------------------------------------------------------------ in

    def load(self, serialized: SerializedState, what: str = "the state") -> None:
        if self.unit.leads:
            super().load(serialized, what)  # (with all processes; each comes to ``_load``)
        else:
            self._load(serialized, what)

    def _load(self, serialized: SerializedState, what: str) -> None:
        ReplicaState.load(self, self._own(serialized, what), what)

    def _own(self, serialized: SerializedState, what: str) -> SerializedState:
        """Return what of a whole state is of this process. Raises CheckpointError: of another model."""
        header = decode_header(serialized.header, what)
        for kind, numbers, names in (
            ("parameter", header.parameters, self.whole.parameters),
            ("buffer", header.buffers, self.whole.buffers),
        ):
            theirs = {header.tensors[n].name for n in numbers}
            for name in sorted(theirs - set(names)):
                raise CheckpointError(f"{what} has {kind} {name!r}, which this model does not have")
            for name in sorted(set(names) - theirs):
                raise CheckpointError(f"{what} has no {kind} {name!r} of this model")
        parameters = {name for name, _ in self.parameters()}
        buffers = {name for name, _ in self.buffers()}

        def own(numbers: Iterable[int], names: set[str]) -> tuple[int, ...]:
            return tuple(n for n in numbers if header.tensors[n].name.removesuffix(".grad") in names)

        trees = {
            name: _own_optimizer(tree, parameters) if name.startswith("optimizer") else tree
            for name, tree in header.trees.items()
            if not name.startswith("extra.") or name in self._extras()
        }
        if _TRAINABLE in trees:
            frozen, reserve = trees[_TRAINABLE]
            trees[_TRAINABLE] = [[n for n in frozen if n in parameters], [n for n in reserve if n in parameters]]
        mine = msgspec.structs.replace(
            header,
            parameters=own(header.parameters, parameters),
            buffers=own(header.buffers, buffers),
            gradients=own(header.gradients, parameters),
            trees=trees,
        )
        return SerializedState(encode_header(mine, what), serialized.body)

    def _extras(self) -> set[str]:
        return {f"extra.{prefix}{at}" for prefix, model in self._models() for at, _ in model.named_modules()}


def _own_optimizer(tree: Any, names: set[str]) -> Any:
    try:
        groups = [{**group, "names": [n for n in group["names"] if n in names]} for group in tree["groups"]]
        return {**tree, "groups": groups, "state": [one for one in tree["state"] if one[0] in names]}
    except (KeyError, TypeError, IndexError):
        return tree  # (who loads it says what is wrong)


# ---------------------------------------------------------------- the whole of the parts


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
        elif name == _TRAINABLE:
            both = [s.header.trees[_TRAINABLE] for s in sources]
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


def digest_of(serialized: SerializedState) -> int:
    """Return the digest of ``ReplicaState.digest``."""
    hashed = hashlib.blake2b(serialized.header, digest_size=8)
    hashed.update(serialized.body.numpy().data)
    return int.from_bytes(hashed.digest(), "little") - _HALF


def named_digests(serialized: SerializedState) -> dict[str, int]:
    """Return digests as ``ReplicaState.parameter_digests`` does."""
    source = Unpacker(serialized, "the state")
    out: dict[str, int] = {}
    for number in (*source.header.parameters, *source.header.buffers):
        tensor = source.view(number)
        head = f"{source.name(number)} {tensor.dtype} {tuple(tensor.shape)}".encode()
        hashed = hashlib.blake2b(head, digest_size=8)
        if tensor.numel():
            hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        out[source.name(number)] = int.from_bytes(hashed.digest(), "little") - _HALF
    return out
