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
from everstep.allreduce.serialize import SerializedState, Unpacker, decode_header, encode_header
from everstep.allreduce.stage_parts import TRAINABLE, WholeModel, joined
from everstep.allreduce.state import ReplicaState
from everstep.errors import CheckpointError
from everstep.model.group import Position
from everstep.pipeline.guard import unguard

_HALF = 1 << 63


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
        if TRAINABLE in trees:
            frozen, reserve = trees[TRAINABLE]
            trees[TRAINABLE] = [[n for n in frozen if n in parameters], [n for n in reserve if n in parameters]]
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


# ---------------------------------------------------------------- digests


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
