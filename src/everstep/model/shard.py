"""Describes shards, leases and tokens: the units of the exactly-once protocol.

Positions: an epoch orders its samples as positions 0..n-1 (a pure function of seed and epoch); a shard is a
range of positions ``[start, stop)``, a batch a range ``[lo, hi)`` inside one shard. Sample *indices* (rows of the
source) come from positions through ``everstep.data.order``; the protocol only ever sees positions.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from everstep.bounds import Whole, Whole63
from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot

_INDEX_BITS, _EPOCH_BITS = 32, 20
LEASE_COUNTER_BITS = 40


class ShardState(IntEnum):
    TODO = 0
    DOING = 1
    DONE = 2
    RELEASED = 3


def shard_key(dataset: int, epoch: int, index: int) -> ShardKey:
    """Pack ``dataset`` (< 2**10), ``epoch`` (< 2**20) and shard ``index`` (< 2**32) into one int."""
    return ShardKey((dataset << _EPOCH_BITS | epoch) << _INDEX_BITS | index)


def split_key(key: ShardKey) -> tuple[int, int, int]:
    """Return the ``(dataset, epoch, index)`` of a key."""
    high, index = key >> _INDEX_BITS, key & ((1 << _INDEX_BITS) - 1)
    return high >> _EPOCH_BITS, high & ((1 << _EPOCH_BITS) - 1), index


def epoch_key(key: ShardKey) -> int:
    """Return ``dataset << 20 | epoch``: the part of the key that a sample's fingerprint depends on."""
    return key >> _INDEX_BITS


def lease_no(master_incarnation: int, counter: int) -> LeaseNo:
    """Return a lease's number, so made that every later one is larger, also across master restarts."""
    return LeaseNo(master_incarnation << LEASE_COUNTER_BITS | counter)


class ShardSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Says how one dataset is cut: the same on every worker, registered once with the master.

    ``samples`` positions an epoch (after drop-last and the evaluation split), cut into shards of
    ``shard_samples`` (the last one may be shorter). ``fingerprint`` stands for the source's identity (paths,
    sizes, schema), so that two workers that read different files are told so.
    """

    name: str
    samples: Whole
    shard_samples: Whole
    seed: Whole63
    fingerprint: str = ""

    @property
    def shards(self) -> int:
        return -(-self.samples // self.shard_samples)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the positions ``[start, stop)`` of shard ``index``."""
        start = index * self.shard_samples
        return start, min(start + self.shard_samples, self.samples)


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Is a worker's time-limited right to one shard. Later leases of the shard fence this one."""

    no: LeaseNo
    shard: ShardKey
    start: Whole
    stop: Whole


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Is what every push carries: which samples, by which right, meant for which life of the ps."""

    shard: ShardKey
    lo: Whole
    hi: Whole
    lease: LeaseNo
    ps_incarnation: Incarnation
    worker: Slot = Slot(0)
    worker_incarnation: Incarnation = Incarnation(0)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Is the samples ``[lo, hi)`` of ``shard``, consumed by one step under ``lease``.

    ``learnt``: their gradient is in what the step applies. Else the script left them out (an iteration without
    ``backward()``, or whose gradient was zeroed before ``step()``), or they were skipped (a gradient not finite)."""

    shard: ShardKey
    lo: Whole
    hi: Whole
    lease: LeaseNo
    learnt: bool = True
