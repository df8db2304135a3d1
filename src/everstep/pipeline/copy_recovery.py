"""Finds the copy of all stages that outlived a worker, for the one that is started in its place."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.allreduce.member_runtime import CopyToBegin
from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.stage_parts import WholeModel, joined
from everstep.ids import Slot
from everstep.model.copy_places import CopyPlace
from everstep.model.group import Committed, HeldCopy
from everstep.pipeline.copy_elsewhere import Connect, newest_elsewhere
from everstep.pipeline.copy_slots import CopyMemory, CopyMeta


class KeptCopy:
    """Is the newest intact copy that an earlier life of this worker left behind (``member_runtime.CopyToBegin``)."""

    def __init__(self, meta: CopyMeta, parts: list[SerializedState], whole: WholeModel) -> None:
        self._meta, self._parts, self._whole = meta, parts, whole
        self.held = HeldCopy(meta.position, meta.lineage)
        self.slot, self.incarnation = meta.slot, meta.incarnation
        self.steps: tuple[Committed, ...] = meta.steps

    def __repr__(self) -> str:
        return f"<KeptCopy of step {self._meta.position.step}, by worker:{self.slot} #{self.incarnation}>"

    @classmethod
    def find(cls, memory: CopyMemory, whole: WholeModel) -> KeptCopy | None:
        """Return the one in the memory of this machine."""
        found = memory.newest()
        return None if found is None else cls(*found, whole)

    @classmethod
    def find_elsewhere(
        cls,
        places: Iterable[CopyPlace],
        connect: Connect,
        slot: Slot,
        stages: int,
        whole: WholeModel,
        own: CopyToBegin | None,
    ) -> CopyToBegin | None:
        """Return the one that agents of other nodes keep, if it is newer than ``own``; else that."""
        than = (own.incarnation, own.held.position.step) if own is not None else (-1, -1)
        found = newest_elsewhere(places, connect, slot, stages, than)
        return own if found is None else cls(*found, whole)

    def serialized(self) -> SerializedState:
        """Return the state of the whole model. Raises CheckpointError, ScriptError: the parts are not of one model."""
        return joined(self._parts, self._whole, self._meta.position, self._meta.loop)
