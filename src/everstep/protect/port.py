"""Shows the native store as the machine of mirrors sees it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from everstep.ids import PartitionId
from everstep.native import Store
from everstep.protect.replication import Blob, StreamKind

PIECE_BYTES = 1 << 20
"""Contents leave in pieces of about this size, so that a push never waits long behind one."""

_HEAD_BYTES = 9  # of a slot: its key, and a bit


_REST = struct.Struct(
    "<IHHIIIIIII"
)  # the header of what is left of a row (native/recover.cpp), the slots' number, a checksum


def rest_slots(blob: Blob) -> Sequence[int]:
    """Return the slots whose records are in a blob of single slots of what is left of a row."""
    count = _REST.unpack_from(blob)[-2]
    slots: list[int] = np.frombuffer(blob, "<u4", count, _REST.size).tolist()
    return slots


class Body(Sequence[Blob]):
    """Holds blobs that lie one behind the other, ``sizes`` bytes each."""

    def __init__(self, data: memoryview, sizes: Sequence[int]) -> None:
        """ValueError: they are not as long as ``data``."""
        if any(size < 0 for size in sizes) or sum(sizes) != data.nbytes:
            raise ValueError(f"{len(sizes)} entries do not make up the {data.nbytes} bytes that came with them")
        self.data, self.sizes = data, sizes
        self.at = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: Any) -> Any:
        return self.data[self.at[i] : self.at[i] + self.sizes[i]]


class StorePort:
    """Is ``machine.Port`` over a ``Store``. Thread-safe as far as the store is."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<StorePort {self._store!r}>"

    # ------------------------------------------------------------ partitions

    def tables(self) -> Sequence[int]:
        return self._store.tables()

    def own(self, partition: PartitionId) -> None:
        self._store.own([partition])

    def protect(self, partition: PartitionId, on: bool) -> None:
        self._store.protect([partition], on)

    def seq(self, partition: PartitionId) -> int:
        return self._store.seq(partition)

    def hand_over(self, partition: PartitionId) -> int:
        return self._store.hand_over(partition)

    def resume(self, partition: PartitionId) -> None:
        self._store.resume(partition)

    def drop(self, partition: PartitionId) -> None:
        self._store.drop(partition)

    def flush(self, partition: PartitionId) -> None:
        self._store.flush(partition)

    def ticket(self) -> int:
        return self._store.outbox_ticket()

    def _slots(self, kind: StreamKind, table: int) -> int:
        """Return how many slots make a piece."""
        size = self._store.layout(table)[2] if kind is StreamKind.BODIES else _HEAD_BYTES
        return max(1, PIECE_BYTES // max(size, 1))

    def emit(self, partition: PartitionId, kind: StreamKind, table: int, lo: int) -> int:
        return self._store.emit(partition, kind, table, lo, lo + self._slots(kind, table))

    def emit_marks(self, partition: PartitionId) -> None:
        self._store.emit_marks(partition)

    def emit_slots(self, partition: PartitionId, table: int, slots: Sequence[int]) -> None:
        self._store.emit_slots(partition, table, np.array(slots, np.uint32))

    # ------------------------------------------------------------ blobs

    def keep(self, blob: Blob) -> Blob:
        return bytes(blob)

    def size(self, blob: Blob) -> int:
        return memoryview(blob).nbytes

    # ------------------------------------------------------------ mirrors

    def mirror_make(self, mirror: int, members: Sequence[PartitionId], row: int) -> None:
        self._store.mirror_make(mirror, list(members), row)

    def mirror_drop(self, mirror: int) -> None:
        self._store.mirror_drop(mirror)

    def mirror_apply(self, mirror: int, blob: Blob) -> int:
        return self._store.mirror_apply(mirror, blob)

    def mirror_apply_many(self, mirrors: Sequence[int], blobs: Sequence[Blob], which: Sequence[int]) -> Sequence[int]:
        if not isinstance(blobs, Body):
            return [self.mirror_apply(mirror, blobs[i]) for mirror, i in zip(mirrors, which, strict=True)]
        at = np.array([blobs.at[i] for i in which], np.int64)
        sizes = np.array([blobs.sizes[i] for i in which], np.int64)
        codes: list[int] = self._store.mirror_apply_many(np.array(mirrors, np.int64), at, sizes, blobs.data).tolist()
        return codes

    def mirror_seq(self, mirror: int, partition: PartitionId) -> int:
        return next((seq for b, seq, _ in self._store.mirror_state(mirror) if b == partition), -1)

    def mirror_complete(self, mirror: int) -> bool:
        return all(complete for _, _, complete in self._store.mirror_state(mirror))

    def promote(self, mirror: int, partition: PartitionId) -> None:
        self._store.promote(mirror, partition)

    def recover_begin(self, mirror: int, lost: Sequence[PartitionId], here: Sequence[PartitionId]) -> None:
        self._store.recover_begin(mirror, list(lost), list(here))

    def recover_fold(self, mirror: int, blob: Blob) -> int:
        return self._store.recover_fold(mirror, blob)

    def recover_other(self, mirror: int, blob: Blob) -> int:
        return self._store.recover_other(mirror, blob)

    def recover_heads(self, mirror: int) -> bool:
        state = self._store.recover_state(mirror)
        return bool(state) and all(heads for heads, _, _, _ in state.values())

    def recover_emit_slots(self, mirror: int, table: int, slots: Sequence[int]) -> tuple[Blob, Sequence[int]]:
        blob = self._store.emit_recovering_slots(mirror, table, np.array(slots, np.uint32))
        return blob, rest_slots(blob) if blob else ()

    def recover_emit(self, mirror: int, kind: StreamKind, table: int, lo: int) -> tuple[Blob, int]:
        next_lo, blob = self._store.emit_recovering(mirror, kind, table, lo, lo + self._slots(kind, table))
        return blob, next_lo

    def recover_end(self, mirror: int, abort: bool) -> None:
        self._store.recover_end(mirror, abort)
