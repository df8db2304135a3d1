"""Judges who is slow, and for how long already.

A member is measured against its *peers*: the others of the same role and hardware class. Slow is who takes more than
``SLOW`` times their median; who was slow stays so until it is below ``CALM`` times. A member without a peer in its
class is never called slow: that its class is another one is known, and what it takes is its normal pace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import msgspec

from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.observation import ServerSeen, WorkerSeen

SLOW = 1.5
CALM = 1.2
PERSISTENT = 0.8  # of the sub-windows
HISTORY = 8  # sub-windows that there must be to call anything persistent


class SlowVerdict(msgspec.Struct, frozen=True):
    """Says how slow a member is. ``slow_share``: of its sub-windows, in which it was slow; ``looks``: how many of those
    there are."""

    slot: Slot
    incarnation: Incarnation
    node: NodeId
    pace_s: float
    normal_s: float
    slow: bool
    slow_share: float
    looks: int

    @property
    def slowness(self) -> float:
        return self.pace_s / self.normal_s

    @property
    def persistent(self) -> bool:
        return self.slow and self.looks >= HISTORY and self.slow_share >= PERSISTENT


class _Reading(msgspec.Struct, frozen=True):
    slot: Slot
    incarnation: Incarnation
    node: NodeId
    hardware: str
    pace_s: float
    history: tuple[float, ...]


def judge(workers: Sequence[WorkerSeen], before: Collection[Slot] = ()) -> tuple[SlowVerdict, ...]:
    """Judge every worker that has a reading. ``before``: who was slow at the last look."""
    readings = [
        _Reading(w.slot, w.incarnation, w.node, w.hardware, w.short.per_sample_s or w.long.per_sample_s, w.history)
        for w in workers
    ]
    return _verdicts(readings, before)


def judge_servers(
    servers: Sequence[ServerSeen],
    paces_s: Mapping[Slot, tuple[float, tuple[float, ...]]],
    before: Collection[Slot] = (),
) -> tuple[SlowVerdict, ...]:
    """Judge every ps of ``paces_s``: seconds for the same work, now and in the last windows, the newest one last."""
    readings = [
        _Reading(s.slot, s.incarnation, s.node, s.hardware, *paces_s[s.slot]) for s in servers if s.slot in paces_s
    ]
    return _verdicts(readings, before)


def _verdicts(readings: Sequence[_Reading], before: Collection[Slot]) -> tuple[SlowVerdict, ...]:
    out: list[SlowVerdict] = []
    there = [r for r in readings if r.pace_s > 0]
    for r in there:
        peers = [p for p in there if p.hardware == r.hardware and p.slot != r.slot]
        normal_s = median(p.pace_s for p in peers) if peers else r.pace_s
        limit = CALM if r.slot in before else SLOW
        looks = [h for h in r.history if h > 0]
        slow_looks = sum(h > SLOW * _normal_then(i, r, peers, normal_s) for i, h in enumerate(r.history) if h > 0)
        out.append(
            SlowVerdict(
                r.slot,
                r.incarnation,
                r.node,
                r.pace_s,
                normal_s,
                bool(peers) and r.pace_s > limit * normal_s,
                slow_looks / len(looks) if looks and peers else 0.0,
                len(looks),
            )
        )
    well: dict[str, list[float]] = {}
    for r, v in zip(there, out, strict=True):
        if not v.slow:
            well.setdefault(r.hardware, []).append(r.pace_s)
    return tuple(
        msgspec.structs.replace(v, normal_s=median(well.get(r.hardware, [v.normal_s])))
        for r, v in zip(there, out, strict=True)
    )


def _normal_then(index: int, r: _Reading, peers: Sequence[_Reading], now_s: float) -> float:
    """Return what the peers took in the same sub-window, counted from the newest one."""
    back = len(r.history) - index
    then = [p.history[-back] for p in peers if len(p.history) >= back and p.history[-back] > 0]
    return median(then) if then else now_s
