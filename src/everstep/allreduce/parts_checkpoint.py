"""Has what a checkpoint in parts consists of: a file with the tensors of each stage, and one that puts them together.

The files of the stages have tensors only. What changes with each step beside them (learning rates, counters, the place
in the data) is in the index, which is small. So a stage whose tensors did not change since an earlier checkpoint needs
no new file: the index names the old one."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from everstep.allreduce.serialize import SerializedState, decode_header
from everstep.allreduce.stage_parts import WholeModel, joined
from everstep.bounds import MALFORMED
from everstep.errors import CheckpointError, ScriptError
from everstep.model.group import Position
from everstep.model.snapshot import CheckpointFile
from everstep.protect.replicafile import ReplicaHead

MOST_STAGES: Final = 4096


class StagePart(msgspec.Struct, frozen=True, array_like=True):
    """Says what a stage's file has. ``header``: of the stage's state (``serialize.SerializedHeader``); ``step``: with
    which the file was written."""

    header: bytes
    body_bytes: int
    step: int


class PartsIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Puts parts together; ``parameters``, ``buffers``: names of the whole model, in its order."""

    position: Position
    loop: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    stages: tuple[StagePart, ...]


class HeldPart(NamedTuple):
    """Is the state of a stage in memory: ``body`` uint8, ``sums`` the checksums of its blocks."""

    header: bytes
    body: NDArray[np.uint8]
    sums: NDArray[np.uint32]


class HeldParts(NamedTuple):
    """Is a copy of all stages, of one step; nothing writes over it before it is released."""

    position: Position
    loop: int
    lineage: int
    parts: tuple[HeldPart, ...]
    whole: WholeModel


class CopiesToPersist(Protocol):
    """Is what ``ReplicaWriter`` asks for copies of the stages; for its thread, but ``begin``."""

    def begin(self, step: int) -> bool:
        """The step is about to begin: have its state copied, and kept. False: nothing is copied any more."""
        ...

    def find(self, step: int) -> HeldParts | None:
        """Return the copy of that step; None: it is not whole (yet)."""
        ...

    def check(self, held: HeldParts, stage: int, lo: int, hi: int) -> None:
        """Raises CheckpointError: bytes [lo, hi) of that stage are damaged."""
        ...

    def intact(self, step: int) -> bool:
        """Return whether the copy is still what ``find`` returned."""
        ...

    def release(self) -> None:
        """Nothing is read from the copy any more. Harmless when repeated."""
        ...


class WrittenPart(NamedTuple):
    """Is a stage's file that a checkpoint has, and what was in it."""

    file: CheckpointFile
    head: ReplicaHead
    sums: NDArray[np.uint32]


def index_of(held: HeldParts, written: tuple[WrittenPart, ...]) -> bytes:
    stages = tuple(
        StagePart(part.header, part.body.nbytes, one.head.position.step)
        for part, one in zip(held.parts, written, strict=True)
    )
    whole = held.whole
    made = PartsIndex(
        position=held.position,
        loop=held.loop,
        parameters=tuple(whole.parameters),
        buffers=tuple(whole.buffers),
        stages=stages,
    )
    return msgspec.msgpack.encode(made)


_index_decoder = msgspec.msgpack.Decoder(PartsIndex)


def read_index(data: bytes, files: int, what: str) -> PartsIndex:
    """``files``: the stages that the manifest has. Raises CheckpointError, which begins with ``what``."""
    try:
        index = _index_decoder.decode(data)
    except MALFORMED as error:
        raise CheckpointError(f"{what} cannot be read: {' '.join(str(error).split())}") from None
    if not 0 < len(index.stages) <= MOST_STAGES or len(index.stages) != files:
        raise CheckpointError(f"{what} is of {len(index.stages)} stages, and the manifest names files of {files}")
    return index


def check_part(head: ReplicaHead, index: PartsIndex, stage: int, what: str) -> None:
    """Raises CheckpointError: the file is of another step, or of another size, than the index says."""
    expected = index.stages[stage]
    if head.position.step != expected.step:
        raise CheckpointError(
            f"{what} is of step {head.position.step}, and the checkpoint needs stage {stage} of step {expected.step}"
        )
    if head.header_bytes or head.body_bytes != expected.body_bytes:
        raise CheckpointError(f"{what} has {head.body_bytes} bytes, and stage {stage} has {expected.body_bytes}")


def together(index: PartsIndex, bodies: list[torch.Tensor], what: str) -> SerializedState:
    """Return the state of the whole model. Raises CheckpointError: the parts are not of one model."""
    parts = [SerializedState(one.header, body) for one, body in zip(index.stages, bodies, strict=True)]
    whole = WholeModel()
    whole.parameters, whole.buffers = list(index.parameters), list(index.buffers)
    found: set[str] = set()
    for stage, part in enumerate(parts):
        header = decode_header(part.header, f"{what}, stage {stage}")
        found |= {header.tensors[number].name for number in (*header.parameters, *header.buffers)}
    for name in (*whole.parameters, *whole.buffers):
        if name not in found:
            raise CheckpointError(f"{what}: no stage has {name!r}")
    try:
        return joined(parts, whole, index.position, index.loop)
    except ScriptError as error:
        raise CheckpointError(f"{what}: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{what} is not built as a state is: {type(error).__name__}: {error}") from None


def parameters_in(held: HeldParts) -> int:
    """Return how many numbers the parameters of all stages have."""
    total = 0
    for part in held.parts:
        header = decode_header(part.header, "a stage's copy")
        total += sum(int(np.prod(header.tensors[n].shape, dtype=np.int64)) for n in header.parameters)
    return total
