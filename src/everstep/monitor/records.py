"""Writes what a ps writes into its audit log ``audit/ps-SLOT.INCARNATION.log`` (``storage.chain``), one message each.

Header of the log: ``{"kind": "ps-audit", "slot": int, "incarnation": int, "buckets": int, "owned": hex}``, ``owned``
being a bitmap (little-endian bits, bit b = partition b) of the partitions that the log speaks for at first: those that
began here, empty. Later records change them: Took adds a partition, Gave takes it away; "owned" below is what they are
then.
"""

from __future__ import annotations

import msgspec

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.reasons import Arrival


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="push", gc=False):
    """Samples ``[lo, hi)`` of ``shard`` were applied to ``applied`` partitions: those in the bitmap, b"" = all owned.

    ``skipped``: the watermarks moved, no gradient was applied. ``at``: seconds since 1970, when it was written.
    ``left_out``: it is skipped because the script did not step on it. ``joined``: it belongs to the same optimizer step
    as the record before it.
    """

    seq: int
    shard: ShardKey
    lo: int
    hi: int
    lease: LeaseNo
    worker: Slot
    worker_incarnation: Incarnation
    applied: int
    partitions: bytes = b""
    skipped: bool = False
    at: float = 0.0
    left_out: bool = False
    joined: bool = False


class CutRecord(msgspec.Struct, frozen=True, array_like=True, tag="cut", gc=False):
    """Has fingerprints of the owned partitions, ascending, uint64 little-endian, with exactly the pushes before it
    in."""

    seq: int
    fingerprints: bytes
    at: float = 0.0


class FinalCutRecord(msgspec.Struct, frozen=True, array_like=True, tag="closed", gc=False):
    """Is the last record of a ps that ended in order: its final cut."""

    seq: int
    fingerprints: bytes
    at: float = 0.0


class AcquiredRecord(msgspec.Struct, frozen=True, array_like=True, tag="took", gc=False):
    """From here on ``partition`` is this ps's, as of the partition's own number ``partition_seq`` (see
    everstep.native).

    ``how``: "promoted" (a copy that was kept here), "rebuilt" (from parity), "loaded" (from a checkpoint snapshot),
    "resumed" (it was to leave, and stays: the new owner was lost), "begun" (empty: all of it was lost). ``version``:
    the placement in force then, which orders the owners of a partition whatever their clocks say; 0: not known.
    ``shards``: int64 pairs (shard, watermark), little-endian, of every shard that is open in it; ``fingerprint``:
    uint64, of the partition then. Whatever an earlier owner applied beyond these watermarks is void.
    """

    seq: int
    partition: int
    how: Arrival
    partition_seq: int
    shards: bytes
    fingerprint: int
    at: float = 0.0
    version: int = 0


class ReleasedRecord(msgspec.Struct, frozen=True, array_like=True, tag="gave", gc=False):
    """From here on ``partition`` is no longer this ps's: it left at its own number ``partition_seq``; nothing is
    applied to it here after this."""

    seq: int
    partition: int
    partition_seq: int
    at: float = 0.0


AuditRecord = Applied | CutRecord | FinalCutRecord | AcquiredRecord | ReleasedRecord


def bitmap(partitions: list[int], n_partitions: int) -> bytes:
    """Return the little-endian bits of ``partitions``."""
    return sum(1 << b for b in partitions).to_bytes(-(-n_partitions // 8), "little")


def audit_header(slot: Slot, incarnation: Incarnation, n_partitions: int, owned: list[int]) -> dict[str, str | int]:
    """Return the header of one ps's log."""
    return {
        "kind": "ps-audit",
        "slot": slot,
        "incarnation": incarnation,
        "buckets": n_partitions,
        "owned": bitmap(owned, n_partitions).hex(),
    }
