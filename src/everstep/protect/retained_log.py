"""The newest differences of partitions that have several mirrors, kept until all of these have them: with them one
mirror is brought to the point of another when the partition gets a new owner.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from everstep.ids import PartitionId
from everstep.protect.replication import Blob


class RetainedLog(Protocol):
    """Is what the machine needs of ``PythonRetainedLog``, or of the receiver, which keeps what it takes in itself."""

    def keep(self, partition: PartitionId, seq: int, blob: Blob) -> None:
        """A difference was applied; nothing if one as new is kept already. ``blob`` outlives its message."""

    def confirm(self, partition: PartitionId, seq: int) -> None:
        """All mirrors have the partition's differences up to ``seq``."""

    def after(self, partition: PartitionId, seq: int) -> list[tuple[int, Blob]]:
        """Return (seq, difference) of those that are newer, oldest first."""

    def drop(self, partition: PartitionId) -> None:
        """Nothing is kept of it any more."""

    def clear(self) -> None:
        """Forget all differences of all partitions."""


class PythonRetainedLog:
    """Is ``RetainedLog`` in Python: the oracle of those in native/receiver.cpp."""

    def __init__(self) -> None:
        self._retained: dict[PartitionId, deque[tuple[int, Blob]]] = {}

    def __repr__(self) -> str:
        return f"<PythonRetainedLog { ({b: len(kept) for b, kept in self._retained.items()}) }>"

    def keep(self, partition: PartitionId, seq: int, blob: Blob) -> None:
        kept = self._retained.setdefault(partition, deque())
        if not kept or kept[-1][0] < seq:
            kept.append((seq, blob))

    def confirm(self, partition: PartitionId, seq: int) -> None:
        kept = self._retained.get(partition)
        while kept and kept[0][0] <= seq:
            kept.popleft()

    def after(self, partition: PartitionId, seq: int) -> list[tuple[int, Blob]]:
        return [(s, blob) for s, blob in self._retained.get(partition, ()) if s > seq]

    def drop(self, partition: PartitionId) -> None:
        self._retained.pop(partition, None)

    def clear(self) -> None:
        self._retained.clear()
