"""Slow ps: how their partitions are divided, when they change hands, and what replacing one is worth.

Theory. A worker's request goes to all ps and lasts as long as its slowest part. So the best division makes all parts
take equally long: ``pace * (fixed + work)``, where ``fixed`` is what any part costs, in partitions' worth of work. How
much that is shows when partitions have moved, so the first division takes it for nothing and another one follows. All
partitions that have to go are asked for at once (the brain moves so many at a time): each round costs windows to
measure.

What is measured is the time of a part, and by its bytes whether it is more work than its partitions would be: so a ps
of hot partitions is not called slow. A window in which partitions changed hands belongs to neither
division, and says nothing.

A move costs about what the workers wait while they open their shards anew: less than a window. Slowness that has
lasted for ``patience`` windows is believed to last as long again, which pays for it; what is shorter is left alone.
When a ps that gave partitions away answers long before the others, for as many windows, it gets some back. If that
spell was short its patience is doubled, so a ps that is slow every now and then soon is left alone, too.

Where all readings jump (a machine that many share), each plan follows what is over when its partitions have arrived. So
each is judged by the windows after it: if the division before it would have been about as fast, ``doubt`` doubles, and
with it everybody's patience; else it halves. And a division that was worse than an even one for ten windows goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.decision import Decision
from everstep.model.observation import Observations, ServerSeen, WorkerSeen
from everstep.model.plan import MovePartitions, Plan
from everstep.policies.stragglers.shares import even
from everstep.policies.stragglers.slow import SlowVerdict, judge_servers

Key = tuple[Slot, Incarnation]

PATIENCE = 3  # windows: so long a ps must be slow, or answer early, before partitions move
AGAIN = 2  # windows: the same, where they have just moved for that reason
PATIENCE_MAX = 48
DOUBT_MAX = 16.0  # times the patience
SETTLE = 6  # windows in which no partition changed hands: what was asked for and has not moved yet will not
SPELL = 30  # windows: slowness that lasted longer was no moment
ANNOUNCED = 32  # partitions that a decision names; the plan has all of them
KEPT = 10  # windows that are remembered of each ps
HOT = 1.5  # times the work of as many partitions
TELLING = 1.5  # so many times more or less work shows what is fixed of a part
FIXED_MAX = 4  # of a ps's even share of partitions
WORTH = 1.08  # a division must make the slowest part of a request so many times faster
LATE = 1.1  # of the others' time: who is slow and answers later holds up requests
EARLY = 0.75  # of the others' time: who answers earlier could do more,
FEW = 0.85  # where it has less than so much of an even share


class Record(msgspec.Struct, frozen=True):
    """Remembers one process. ``parts``: of a request, by window, newest last: its seconds, and its work in partitions'
    worth; ``clean``: how many of them were measured since partitions changed hands. ``late``, ``early``: for how many
    windows it has been so."""

    parts: tuple[tuple[float, float], ...] = ()
    clean: int = 0
    late: int = 0
    early: int = 0

    def paces_s(self, fixed: float) -> tuple[float, ...]:
        return tuple(s / (fixed + work) for s, work in self.parts)

    def pace_s(self, fixed: float) -> float:
        """Of the last windows together: one alone may be off."""
        return median(self.paces_s(fixed)[-min(PATIENCE, self.clean) :])

    def work(self) -> float:
        """Return the work of the last windows; 0.0: none."""
        last = self.parts[-min(PATIENCE, self.clean) :] if self.clean else ()
        return median(work for _, work in last) if last else 0.0

    def fixed(self) -> float | None:
        """Return the fixed part, by its parts before and after partitions moved; None: that does not show it (yet, or
        any more)."""
        now, before = self.parts[-self.clean :], self.parts[: -self.clean][-PATIENCE:]
        if self.clean != AGAIN or len(before) < AGAIN:
            return None
        (now_s, work), (was_s, had) = ((median(s for s, _ in p), median(w for _, w in p)) for p in (now, before))
        if max(work, had) < TELLING * min(work, had):
            return None
        if (now_s - was_s) * (work - had) <= 0:  # less work does not take longer: it became slower or faster meanwhile
            return None
        return max(0.0, (now_s * had - was_s * work) / (was_s - now_s))


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """Is what the policy remembers of ps. ``owned``: partitions by ps at the last look. ``slow``: who was then.
    ``patience``: where it is not the usual. ``relieved``: when who gave partitions away. ``wanted``: partitions by ps
    when the moves that were asked for are done; ``waits``: windows for which to wait for that, from the last change on.
    ``rounds``: how often partitions were asked to move. ``fixed``: of a part, in partitions' worth of work. ``before``:
    partitions by ps before the last plan, until it is judged; ``doubt``: how often plans were wrong lately, so many
    times the patience."""

    owned: dict[Slot, int] = {}
    records: dict[Key, Record] = {}
    slow: frozenset[Slot] = frozenset()
    patience: dict[Slot, int] = {}
    relieved: dict[Slot, float] = {}
    wanted: dict[Slot, int] = {}
    waits: int = 0
    rounds: int = 0
    fixed: float = 0.0
    before: dict[Slot, int] = {}
    doubt: float = 1.0

    def windows(self, slot: Slot) -> int:
        """For so many it must be slow, or answer early."""
        return min(PATIENCE_MAX, int(self.doubt * self.patience.get(slot, PATIENCE)))

    def unsettled(self, v: SlowVerdict) -> bool:
        """Whether partitions move, or may do so before long, because of this one. (One that answers early is not slow:
        of its few partitions, each has much of what is fixed of a part.)"""
        r = self.records[v.slot, v.incarnation]
        return self.waits > 0 or r.early > 0 or 0 < r.late <= self.windows(v.slot)


class Look(msgspec.Struct, frozen=True):
    """Is one window of the ps that have a reading. ``part_s``: of a request; ``work``: of it, in partitions' worth: of
    all these ps together, as many as they have partitions."""

    part_s: dict[Slot, float]
    work: dict[Slot, float]

    def others_s(self, slot: Slot) -> float:
        """Return the median part of all others; 0.0: there are none."""
        others = [s for other, s in self.part_s.items() if other != slot]
        return median(others) if others else 0.0


def look_at(servers: Sequence[ServerSeen]) -> Look:
    """Work is partitions; of a ps of which much more or less than that goes in and out, it is that. (Not of every ps:
    in a window of a few long steps, one may have been counted a step more than another.)"""
    there = [s for s in servers if s.partitions > 0 and s.service_s > 0]
    total, total_bytes = sum(s.partitions for s in there), sum(s.bytes_per_s for s in there)
    work = {s.slot: float(s.partitions) for s in there}
    if all(s.bytes_per_s > 0 for s in there):
        found = {s.slot: total * s.bytes_per_s / total_bytes for s in there}
        work |= {slot: w for slot, w in found.items() if not work[slot] / HOT < w < work[slot] * HOT}
    return Look({s.slot: s.service_s for s in there}, work)


def watch(seen: Observations, state: Servers) -> tuple[tuple[SlowVerdict, ...], Servers]:
    """Judge the ps by one more window; no verdicts: it says nothing."""
    new = {s.slot for s in seen.servers if (s.slot, s.incarnation) not in state.records}
    if new & (state.patience.keys() | state.relieved.keys()):  # what its last process was like is nothing of its own
        patience, relieved = ({s: v for s, v in d.items() if s not in new} for d in (state.patience, state.relieved))
        state = msgspec.structs.replace(state, patience=patience, relieved=relieved)
    owned = {s.slot: s.partitions for s in seen.servers}
    old = {(s.slot, s.incarnation): state.records.get((s.slot, s.incarnation), Record()) for s in seen.servers}
    if owned != state.owned:
        waits = SETTLE if state.waits and owned != state.wanted else 0
        records = {
            key: Record(r.parts, 0, max(0, r.late and r.late - AGAIN), max(0, r.early and r.early - AGAIN))
            for key, r in old.items()
        }
        return (), msgspec.structs.replace(state, owned=owned, records=records, waits=waits)
    look = look_at(seen.servers)
    level = sum(owned.values()) // max(1, len(owned))
    records = dict(old)
    for s in seen.servers:
        if s.slot in look.part_s:
            r, part_s, others_s = old[s.slot, s.incarnation], look.part_s[s.slot], look.others_s(s.slot)
            late, early = part_s > LATE * others_s > 0, s.partitions < FEW * level and part_s < EARLY * others_s
            parts = (*r.parts, (part_s, look.work[s.slot]))[-KEPT:]
            records[s.slot, s.incarnation] = Record(
                parts, r.clean + 1, r.late + 1 if late else 0, r.early + 1 if early else 0
            )
    judged = {s.slot: records[s.slot, s.incarnation] for s in seen.servers if s.slot in look.part_s}
    found = [f for r in judged.values() if (f := r.fixed()) is not None]
    fixed = min(median(found), float(level * FIXED_MAX)) if found else state.fixed
    paces = {slot: (r.pace_s(fixed), r.paces_s(fixed)) for slot, r in judged.items()}
    verdicts = judge_servers(seen.servers, paces, state.slow)
    slow = frozenset(v.slot for v in verdicts if v.slow)
    waits = max(0, state.waits - 1)
    state = msgspec.structs.replace(state, records=records, slow=slow, waits=waits, fixed=fixed)
    return verdicts, _judged(state, {slot: r for slot, r in judged.items() if r.clean >= PATIENCE})


def _judged(state: Servers, records: Mapping[Slot, Record]) -> Servers:
    """Judge whether the last plan was right, by the windows after it (none, while its partitions have not moved
    yet)."""
    if state.before in ({}, state.owned) or not state.before.keys() == state.owned.keys() == records.keys():
        return state
    pace = {slot: r.pace_s(state.fixed) for slot, r in records.items()}
    was_s, now_s = (max((n + state.fixed) * pace[s] for s, n in c.items()) for c in (state.before, state.owned))
    doubt = max(1.0, state.doubt / 2) if was_s > WORTH * now_s else min(DOUBT_MAX, state.doubt * 2)
    return msgspec.structs.replace(state, before={}, doubt=doubt)


def divide_partitions(
    seen: Observations, verdicts: Sequence[SlowVerdict], state: Servers
) -> tuple[Plan | None, Servers]:
    """Take work from a ps that has been slow for long enough, or give some back to one that could do more."""
    if len(verdicts) < 2 or state.waits:
        return None, state
    servers = {s.slot: s for s in seen.servers}
    records = {slot: state.records[slot, s.incarnation] for slot, s in servers.items()}
    patience = {slot: state.windows(slot) for slot in servers}
    clean_records = [v for v in verdicts if records[v.slot].clean >= AGAIN]
    late = [v for v in clean_records if records[v.slot].late >= patience[v.slot] and v.slow]
    early = [v for v in clean_records if records[v.slot].early >= patience[v.slot]]
    have = {slot: s.partitions for slot, s in servers.items()}
    level = dict(zip(have, even(sum(have.values()), len(have)), strict=True))
    uneven = state.rounds > 0 and _slower(records, have, level, state.fixed) > WORTH  # (and it was not so before)
    if not late and not early and not uneven:
        return None, state
    # who is not slow has its class's pace, so noise is not followed; who has no reading is as fast as most
    paces = dict.fromkeys(servers, median(v.normal_s for v in verdicts))
    for v in verdicts:
        paces[v.slot] = v.pace_s if v.slow or records[v.slot].early else v.normal_s
    # a partition of a ps whose partitions are hot is more than one partition's worth of work
    worth = {slot: records[slot].work() / s.partitions or 1.0 if s.partitions else 1.0 for slot, s in servers.items()}
    part = {slot: (paces[slot] * state.fixed, paces[slot] * worth[slot]) for slot in servers}
    owners = transfers(servers, level if uneven else divided(sum(have.values()), part), state.rounds)
    was = {partition: slot for slot, s in servers.items() for partition in s.owned}
    wanted = dict(have)
    for partition, slot in owners.items():
        wanted[slot] += 1
        wanted[was[partition]] -= 1
    now_s, then_s = (max(part[s][0] + n * part[s][1] for s, n in counts.items()) for counts in (have, wanted))
    # (who answers early, may have as much as holds up nobody)
    if not owners or (not uneven and now_s < (WORTH if late else 1.0) * then_s):
        return None, state
    if uneven:
        action, words = "level the partitions", f"an even division would have been faster in the last {KEPT} windows"
        rejected, windows = "leave them: who was slow when they moved is not any more", KEPT
        for slot in state.relieved.keys() - state.slow:
            state = _well(seen, state, slot)
    elif late:
        worst = max(late, key=lambda v: (v.slowness, -v.slot))
        words = f"ps:{worst.slot} takes {worst.slowness:.1f} times as long as its peers, for the same work"
        action, rejected = "relieve the ps", "restart it: it keeps training while partitions move"
        windows = records[worst.slot].late
        state = msgspec.structs.replace(state, relieved={worst.slot: seen.at, **state.relieved})
    else:
        best = min(early, key=lambda v: (v.pace_s, v.slot))
        words = f"ps:{best.slot} answers long before its peers, and has fewer partitions"
        action, rejected = "give partitions back", "leave it: the others would go on doing its work"
        windows = records[best.slot].early
        state = _well(seen, state, best.slot)
    inputs: dict[str, str | int | float | bool] = {
        f"ps:{v.slot}": f"{paces[v.slot] * 1e3:.3g} ms, {servers[v.slot].partitions} to {wanted[v.slot]}"
        for v in verdicts
    }
    inputs |= {"windows": windows, "faster": round(now_s / then_s, 3), "partitions": len(owners)}
    inputs |= {"fixed": round(state.fixed, 2)}
    inputs |= {f"partition {b}": f"to ps:{slot}" for b, slot in list(owners.items())[:ANNOUNCED]}
    plan = Plan(actions=(MovePartitions(owners=owners),), decision=Decision(action, words, inputs, (rejected,)))
    state = msgspec.structs.replace(state, wanted=wanted, waits=SETTLE, rounds=state.rounds + 1, before=have)
    return plan, state


def _slower(records: Mapping[Slot, Record], have: Mapping[Slot, int], other: Mapping[Slot, int], fixed: float) -> float:
    """Return how many times faster the windows that are remembered would have been with the ``other`` division; 0.0:
    too few of them are of this one."""
    if not all(len(r.parts) == KEPT <= r.clean for r in records.values()):
        return 0.0
    paces = {slot: r.paces_s(fixed) for slot, r in records.items()}
    have_s, other_s = (
        sum(max((n + fixed) * paces[slot][i] for slot, n in counts.items()) for i in range(KEPT))
        for counts in (have, other)
    )
    return have_s / other_s if other_s else 0.0


def _well(seen: Observations, state: Servers, slot: Slot) -> Servers:
    """It is well again: how long it must be slow the next time, by how long it was this time."""
    if slot not in state.relieved:
        return state
    patience = {s: windows for s, windows in state.patience.items() if s != slot}
    if seen.at - state.relieved[slot] < SPELL * seen.window_s:
        patience[slot] = min(PATIENCE_MAX, 2 * state.patience.get(slot, PATIENCE))
    relieved = {s: at for s, at in state.relieved.items() if s != slot}
    return msgspec.structs.replace(state, patience=patience, relieved=relieved)


def divided(total: int, part_s: Mapping[Slot, tuple[float, float]]) -> dict[Slot, int]:
    """Partitions by ps for a slowest part that is as fast as can be: one after the other goes to who has it done first.
    ``part_s``: seconds of a part, and for each partition. Every ps has one: what has none is never measured again."""
    counts = dict.fromkeys(part_s, 1)
    ends = [(fixed_s + 2 * each_s, slot) for slot, (fixed_s, each_s) in part_s.items()]
    heapq.heapify(ends)
    for _ in range(total - len(counts)):
        end_s, slot = ends[0]
        counts[slot] += 1
        heapq.heapreplace(ends, (end_s + part_s[slot][1], slot))
    return counts


def transfers(
    servers: Mapping[Slot, ServerSeen], wanted: Mapping[Slot, int], rounds: int = 0
) -> dict[PartitionId, Slot]:
    """Return the partitions that change hands, and to whom: as few as can be. ``rounds``: other ones each time, since
    of a stripe's partitions only the first one may go where the plan says.

    A ps that is closed to all that another one gives (it may keep the mirrors of all of it) gets partitions of a third
    one, which takes those."""
    room = {slot: wanted[slot] - s.partitions for slot, s in servers.items()}
    closed = {slot: frozenset(s.closed) for slot, s in servers.items()}
    turned = {slot: _turned(s.owned, rounds) for slot, s in servers.items()}
    out: dict[PartitionId, Slot] = {}

    def first(giver: Slot, taker: Slot) -> PartitionId | None:
        return next((b for b in turned[giver] if b not in out and b not in closed[taker]), None)

    for slot in sorted(s for s in room if room[s] < 0):
        for partition in turned[slot]:
            open_to = [s for s in room if room[s] > 0 and partition not in closed[s]]
            if room[slot] == 0 or not open_to:
                continue
            out[partition] = max(open_to, key=lambda s: (room[s], -s))
            room[out[partition]] -= 1
            room[slot] += 1
        taken = dict.fromkeys(servers, 0)  # and passed on as many
        for target in sorted((s for s in room if room[s] > 0), key=lambda s: (-room[s], s)):
            while room[slot] < 0 < room[target]:
                middles = [m for m in servers if m not in (slot, target) and first(slot, m) is not None]
                middles = [m for m in middles if first(m, target) is not None]
                if not middles:
                    break
                middle = min(middles, key=lambda m: (taken[m], m))
                given, passed = first(slot, middle), first(middle, target)
                assert given is not None and passed is not None
                out |= {given: middle, passed: target}
                taken[middle] += 1
                room[target] -= 1
                room[slot] += 1
    return out


def _turned(owned: tuple[PartitionId, ...], rounds: int) -> tuple[PartitionId, ...]:
    turn = rounds % max(1, len(owned))
    return (*owned[turn:], *owned[:turn])


# ---------------------------------------------------------------- another process in its place


def waited_share(workers: Sequence[WorkerSeen]) -> float:
    """Return for how much of their time workers waited for rows: what faster ps could save; 1.0: unknown."""
    shares = []
    for w in workers:
        spent_s = sum(s for name, s in w.short.phases.items() if name != "outside")
        if spent_s > 0:
            shares.append(sum(w.short.phases.get(name, 0.0) for name in ("data", "pull", "push")) / spent_s)
    return median(shares) if shares else 1.0


def replacing_saves_s(servers: int, slowness: float, waited: float, remaining_s: float) -> float:
    """One of ``servers`` is ``slowness`` times slower, with its work made less; at today's speed ``remaining_s`` are
    left. Replaced, it does its part of the work again: at best nobody waits for rows any more, and no more is saved
    than ``1 / servers`` of the work without what it does now:

        remaining_s * min(waited, (1 - 1 / slowness) / servers)
    """
    if slowness <= 1.0 or servers < 1:
        return 0.0
    return remaining_s * min(waited, (1 - 1 / slowness) / servers)
