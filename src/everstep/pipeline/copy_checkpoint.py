"""Has checkpoints written from the copies that stages make in their waits, by the first stage of a worker.

All stages copy the state before one step. When all have it whole, a thread of the first stage writes it from memory,
while the stages go on to copy later steps into other slots."""

from __future__ import annotations

from everstep.allreduce.parts_checkpoint import HeldPart, HeldParts
from everstep.allreduce.stage_parts import WholeModel
from everstep.errors import CheckpointError
from everstep.pipeline.copy_slots import BLOCK_BYTES, CopyMemory, SlotHead
from everstep.pipeline.slot_memory import CopySlot, check_blocks
from everstep.pipeline.stage_copies import StageCopies


class CopyCheckpoint:
    """Is a ``parts_checkpoint.CopiesToPersist``."""

    def __init__(self, memory: CopyMemory, copies: StageCopies, whole: WholeModel, life: int) -> None:
        self._memory, self._copies, self._whole, self._life = memory, copies, whole, life
        self._found: list[tuple[CopySlot, SlotHead]] = []

    def __repr__(self) -> str:
        return f"<CopyCheckpoint of step {self._memory.page.held}>"

    def begin(self, step: int) -> bool:
        return self._copies.hold(step)

    def find(self, step: int) -> HeldParts | None:
        """See the protocol. Raises CheckpointError: what the copy says of itself is damaged."""
        found: list[tuple[CopySlot, SlotHead]] = []
        for slots in self._memory.slots:
            heads = ((slot, slot.head()) for slot in slots)
            whole = [(slot, head) for slot, head in heads if head is not None and head[:2] == (step, self._life)]
            if not whole:
                return None
            found.append(whole[0])
        meta = found[0][0].meta(found[0][1])
        parts = []
        for stage, (slot, head) in enumerate(found):
            header = slot.header(head, f"the copy of stage {stage}")
            _, body, sums = slot.contents(head)
            parts.append(HeldPart(header, body, sums.copy()))
        self._found = found
        return HeldParts(meta.position, meta.loop, meta.lineage, tuple(parts), self._whole)

    def check(self, held: HeldParts, stage: int, lo: int, hi: int) -> None:
        part = held.parts[stage]
        first, last = lo // BLOCK_BYTES, -(-hi // BLOCK_BYTES)
        body = part.body[first * BLOCK_BYTES : last * BLOCK_BYTES]
        try:
            check_blocks(body, part.sums[first:last], first, f"the copy of stage {stage}")
        except CheckpointError:
            if self.intact(held.position.step):
                raise
            raise CheckpointError("the state that it is of was lost meanwhile") from None

    def intact(self, step: int) -> bool:
        return bool(self._found) and all(slot.head() == head for slot, head in self._found)

    def release(self) -> None:
        self._found = []
        self._memory.page.held = -1
