"""Has ``shared``: machines that others use too. Slow for moments, for long, or always; workers and ps.

Theory. Dividing a step by the speeds of the last window is right as long as the next window is like the last. Where
slow spells are about as long as a window it is wrong both times: nothing is done while somebody is slow, and when
something is done, that one is fast again. So each look first judges what the *last* look proposed by *this* window's
readings: would the step have been faster so than with equal shares? The sum of these (``score``, in windows of healthy
work, old ones fading) says whether reacting pays here, and while it does not, shares stay equal. What is tried costs
nothing: the proposal is judged whether it was in force or not. And whose pace is new is believed at once only if
that pays by how often such changes lasted so far (``change_detector``): a hiccup is not followed.

Workers: shares by speed where steps are common; nothing for moments where each takes shards at its own pace. A worker
that is slow in most of its windows is ended and started elsewhere, if that pays (``payoff``). Servers: one that stays
slow gives partitions away until its time is everybody's (``servers``), and is replaced, if that pays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import msgspec

from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.observation import Observations, Pace, WorkerSeen
from everstep.model.plan import Action, AdjustAccum, AdjustBatch, KillRestart, Plan
from everstep.policies.stragglers.change_detector import Changes, Key, PolicyTrust, review, scored, step_s
from everstep.policies.stragglers.payoff import restart_gain_s
from everstep.policies.stragglers.servers import Servers, divide_partitions, replacing_saves_s, waited_share, watch
from everstep.policies.stragglers.shares import even, proportional
from everstep.policies.stragglers.slow import SlowVerdict, judge

Inputs = dict[str, str | int | float | bool]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds seconds and ratios; what a policy's own callable may choose differently."""

    worth: float = 1.05  # a split must make the step so many times faster than equal shares, as the readings say
    better: float = 1.03  # and so many times faster than the one in force, or it is left alone
    trust: PolicyTrust = PolicyTrust()
    restart_s: float = 20.0  # from the end of a process to full speed of the next one, at worst
    cooldown_s: float = 300.0  # between two restarts, of any role
    budget: int = 8  # restarts by this policy in the whole job


class SharedState(msgspec.Struct, frozen=True, kw_only=True):
    """``score``: None: nothing was seen yet. ``proposed``: shares of the last look, by process. ``paces``: the newest
    seconds per sample that are alike and believed. ``slow``: who was slow at the last look. ``servers``: see there.
    ``in_place``: processes that were to be started anew where they had been, for want of another node: once for each
    slot is enough. (One that is still there was not: the plan was dropped.)"""

    score: float | None = None
    proposed: dict[Key, int] = {}
    paces: dict[Key, tuple[float, ...]] = {}
    changes: Changes = Changes()
    slow: frozenset[Slot] = frozenset()
    servers: Servers = Servers()
    in_place: dict[tuple[Role, Slot], Incarnation] = {}


DEFAULT = Settings()
WINDOW_S = 10.0  # where nobody says
ALIKE_LOOKS = 4  # of which the median is what a worker's pace is


def shared(
    seen: Observations, state: SharedState | None, settings: Settings = DEFAULT
) -> tuple[Plan | None, SharedState | None]:
    """See the top of this file."""
    state = state or SharedState()
    workers = judge(seen.workers, state.slow)
    servers, watched = watch(seen, state.servers)
    state = msgspec.structs.replace(state, slow=frozenset(v.slot for v in workers if v.slow), servers=watched)
    for choose in (_restart_worker, _mend_server, _divide):
        verdicts = servers if choose is _mend_server else workers
        plan, state = choose(seen, state, verdicts, settings)
        if plan is not None:
            return plan, state
    return None, state


# ---------------------------------------------------------------- shares


def _divide(
    seen: Observations, state: SharedState, verdicts: Sequence[SlowVerdict], settings: Settings
) -> tuple[Plan | None, SharedState]:
    """Divide by speed, where reacting has paid lately; equally else."""
    workers, total = seen.workers, seen.global_batch
    if len(verdicts) < len(workers) or not 2 <= len(workers) <= total or any(w.share <= 0 for w in workers):
        return None, msgspec.structs.replace(state, proposed={})  # somebody has no reading yet
    keys: list[Key] = [(w.slot, w.incarnation) for w in workers]
    readings = {key: v.pace_s for key, v in zip(keys, verdicts, strict=True)}
    left = seen.remaining_s / (seen.window_s or WINDOW_S)
    under_way = {(w.slot, w.incarnation) for w in workers if w.short.under_way}
    score = scored(state.score, {} if under_way else state.proposed, readings, left, settings.trust)
    state = _believed(state, workers, readings, under_way)
    pace = [median(state.paces[key]) for key in keys]
    verdicts = judge(
        [msgspec.structs.replace(w, short=Pace(per_sample_s=p)) for w, p in zip(workers, pace, strict=True)], state.slow
    )
    level = even(total, len(workers))
    # who is not slow has its class's pace: noise is not followed
    speeds = [1 / (v.pace_s if v.slow else v.normal_s) for v in verdicts]
    wanted = proportional(total, speeds)
    if step_s(level, pace) < settings.worth * step_s(wanted, pace):
        wanted = level
    state = msgspec.structs.replace(state, score=score, proposed=dict(zip(keys, wanted, strict=True)))
    target = wanted if score > 0 else level
    now = [w.share for w in workers]
    faster = step_s(now, pace) / step_s(target, pace)
    back = target == level and max(now) > max(level)
    if now == target or (faster < settings.better and not back):
        return None, state
    slow = ", ".join(f"worker:{v.slot} {v.slowness:.1f}x" for v in verdicts if v.slow)
    reason = f"slow: {slow}" if slow else "speeds differ by hardware"
    if target == level:
        reason = "all are about equally fast" if wanted == level else "slow spells are too short to react to"
    inputs: Inputs = {
        f"worker:{w.slot}": f"{p * 1e3:.3g} ms, {n}" for w, p, n in zip(workers, pace, target, strict=True)
    }
    inputs |= {"global_batch": total, "faster": round(faster, 3), "score": round(score, 3)}
    batch = {w.slot: n for w, n in zip(workers, target, strict=True)}
    actions: list[Action] = [AdjustBatch(batch=batch)]
    passes = {w.slot: -(-batch[w.slot] // w.memory_batch) for w in workers if w.memory_batch > 0}
    if passes:
        actions.append(AdjustAccum(accum=passes))
    rejected = () if target == level else ("equal shares: everybody waits for the slowest",)
    return Plan(actions=tuple(actions), decision=Decision("adjust batches", reason, inputs, rejected)), state


def _believed(
    state: SharedState, workers: Sequence[WorkerSeen], readings: Mapping[Key, float], under_way: Collection[Key]
) -> SharedState:
    """Return the state with what is believed of everybody's pace after this look; who is new is believed."""
    paces = {key: state.paces.get(key, (s,)) for key, s in readings.items()}
    expected = {key: (median(known), median(known)) for key, known in paces.items()}
    new = {(w.slot, w.incarnation) for w in workers if w.short.per_sample_s > 0}
    shares = {(w.slot, w.incarnation): w.share for w in workers}
    changes, believed, doubted = review(
        state.changes, expected, {key: s for key, s in readings.items() if key in new}, shares, under_way
    )
    for key in new - doubted:
        paces[key] = (readings[key],) if key in believed else (*paces[key], readings[key])[-ALIKE_LOOKS:]
    return msgspec.structs.replace(state, paces=paces, changes=changes)


# ---------------------------------------------------------------- restarts


def _restart_worker(
    seen: Observations, state: SharedState, verdicts: Sequence[SlowVerdict], settings: Settings
) -> tuple[Plan | None, SharedState]:
    worst = max((v for v in verdicts if v.persistent), key=lambda v: (v.slowness, -v.slot), default=None)
    if worst is None or not _may_restart(seen, settings):
        return None, state
    innocent = {w.node for w in seen.workers if any(v.slot == w.slot and not v.slow for v in verdicts)}
    place = _place(seen.places, worst.node, innocent)
    known = [w for w in seen.workers if any(v.slot == w.slot for v in verdicts)]
    shares = [w.share for w in known] if seen.global_batch else []
    slots, paces = [v.slot for v in verdicts], [v.pace_s for v in verdicts]
    gain_s = restart_gain_s(
        paces,
        slots.index(worst.slot),
        worst.normal_s,
        shares,
        settings.restart_s,
        seen.remaining_s,
        seen.remaining_samples,
    )
    if not place or gain_s <= 0:
        return None, state
    inputs: Inputs = {"members": len(seen.workers), "saves_s": round(gain_s + settings.restart_s, 1)}
    return _restart(seen, state, worst, Role.WORKER, place, inputs, settings)


def _may_restart(seen: Observations, settings: Settings) -> bool:
    if seen.pending or seen.restarts >= settings.budget:
        return False
    return not seen.restarts or seen.at >= seen.restarted_at + settings.cooldown_s


def _place(places: Sequence[NodeId], node: NodeId, innocent: set[NodeId]) -> str:
    """Return where another process would be better off: another node, or its own where others are well; "": nowhere."""
    others = [other for other in places if other != node]
    return others[0] if others else (node if node in innocent and node in places else "")


def _restart(
    seen: Observations,
    state: SharedState,
    v: SlowVerdict,
    role: Role,
    place: str,
    inputs: Inputs,
    settings: Settings,
) -> tuple[Plan | None, SharedState]:
    """Restart a worker; ``inputs``: what else speaks for it, ``saves_s`` among that: of the job's time."""
    if place == v.node:
        if state.in_place.get((role, v.slot), v.incarnation) != v.incarnation:
            return None, state
        state = msgspec.structs.replace(state, in_place={**state.in_place, (role, v.slot): v.incarnation})
    inputs = {
        **inputs,
        "slowness": round(v.slowness, 2),
        "slow_share": round(v.slow_share, 2),
        "windows": v.looks,
        "restart_s": settings.restart_s,
        "remaining_s": round(seen.remaining_s, 1),
        "place": place,
        "restarts_before": seen.restarts,
    }
    words = f"{role}:{v.slot} takes {v.slowness:.1f} times as long as its peers for the same work, and was slow in "
    words += f"{v.slow_share:.0%} of its windows"
    rejected = f"keep it: that costs {inputs['saves_s']} s of what is left, a restart {settings.restart_s:g} s"
    why = Decision("restart", words, inputs, (rejected,))
    return Plan(actions=(KillRestart(role=role, slot=v.slot, incarnation=v.incarnation),), decision=why), state


# ---------------------------------------------------------------- servers


def _mend_server(
    seen: Observations, state: SharedState, verdicts: Sequence[SlowVerdict], settings: Settings
) -> tuple[Plan | None, SharedState]:
    """Move partitions first; who is slow nevertheless, or because the others do its work, is replaced where that
    pays."""
    plan, servers = divide_partitions(seen, verdicts, state.servers)
    state = msgspec.structs.replace(state, servers=servers)
    worst = max((v for v in verdicts if v.persistent), key=lambda v: (v.slowness, -v.slot), default=None)
    if plan is not None or worst is None or servers.unsettled(worst) or not _may_restart(seen, settings):
        return plan, state
    innocent = {s.node for s in seen.servers if any(v.slot == s.slot and not v.slow for v in verdicts)}
    place, waited = _place(seen.ps_places, worst.node, innocent), waited_share(seen.workers)
    saves_s = replacing_saves_s(len(verdicts), worst.slowness, waited, seen.remaining_s)
    if not place or saves_s <= settings.restart_s:
        return None, state
    inputs: Inputs = {"members": len(verdicts), "waited": round(waited, 2), "saves_s": round(saves_s, 1)}
    return _restart(seen, state, worst, Role.PS, place, inputs, settings)
