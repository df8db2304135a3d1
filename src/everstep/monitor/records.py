"""What a ps writes into its audit log ``audit/ps-SLOT.INCARNATION.log`` (``storage.chain``), one message each.

Header of the log: ``{"kind": "ps-audit", "slot": int, "incarnation": int, "buckets": int, "owned": hex}``, ``owned``
being a bitmap (little-endian bits, bit b = bucket b) of the buckets that the log speaks for.
"""

from __future__ import annotations

import msgspec

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="push", gc=False):
    """Samples ``[lo, hi)`` of ``shard`` were applied to ``applied`` buckets: those in the bitmap, b"" = all owned.

    ``skipped``: the watermarks moved, no gradient was applied. ``at``: seconds since 1970, when it was written.
    """

    seq: int
    shard: ShardKey
    lo: int
    hi: int
    lease: LeaseNo
    worker: Slot
    worker_incarnation: Incarnation
    applied: int
    buckets: bytes = b""
    skipped: bool = False
    at: float = 0.0


class Cut(msgspec.Struct, frozen=True, array_like=True, tag="cut", gc=False):
    """Fingerprints of the owned buckets, ascending, uint64 little-endian, with exactly the pushes before it in."""

    seq: int
    fingerprints: bytes
    at: float = 0.0


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed", gc=False):
    """The last record of a ps that ended in order: its final cut."""

    seq: int
    fingerprints: bytes
    at: float = 0.0


AuditRecord = Applied | Cut | Closed


def bitmap(buckets: list[int], n_buckets: int) -> bytes:
    """Little-endian bits of ``buckets``."""
    return sum(1 << b for b in buckets).to_bytes(-(-n_buckets // 8), "little")


def audit_header(slot: Slot, incarnation: Incarnation, n_buckets: int, owned: list[int]) -> dict[str, str | int]:
    """The header of one ps's log."""
    return {
        "kind": "ps-audit",
        "slot": slot,
        "incarnation": incarnation,
        "buckets": n_buckets,
        "owned": bitmap(owned, n_buckets).hex(),
    }
