"""Judges whether what is read now is how it will go on: when a change of somebody's pace is believed, and whether
splits pay.

A member that reads otherwise than before may have changed for long, or have hiccuped once. To believe a change that
passes costs a window of the wrong split, to doubt one that lasts a window of the old one; both are known, and how often
changes lasted so far is counted. So a change is believed at once iff ``p * gain > (1 - p) * loss``, else when the next
window reads the same. A new split costs nothing and is undone as cheaply: no other hysteresis is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import log

import msgspec

from everstep.ids import Incarnation, Slot
from everstep.policies.stragglers.shares import even, proportional

Key = tuple[Slot, Incarnation]
Span = tuple[float, float]
ALIKE = 1.3
REMEMBERED = 40.0  # changes of which the outcome counts


class PolicyTrust(msgspec.Struct, frozen=True, kw_only=True):
    """Says how much splits are trusted. ``fade``: of it, a window. ``first``: its first value in a job of which more
    than ``long`` windows are left. ``bound``: both ways, so what counts is what happened lately."""

    fade: float = 0.97
    first: float = 0.05
    long: float = 20.0
    bound: float = 2.0


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Remembers changes of pace. ``slower``, ``faster``: how many of such changes lasted until the next look, and how
    many had passed. Nothing is known of the slower ones at first; nothing makes a machine look faster than it is."""

    open: dict[Key, Span] = {}
    slower: Span = (1.0, 1.0)
    faster: Span = (40.0, 0.4)


def review(
    changes: Changes,
    expected: Mapping[Key, Span],
    readings: Mapping[Key, float],
    shares: Mapping[Key, int],
    under_way: Collection[Key] = (),
) -> tuple[Changes, frozenset[Key], frozenset[Key]]:
    """Return who reads otherwise than ``expected`` (seconds per sample, from and to) and is believed, and who is not.

    ``readings``: new ones, > 0, of those who have one; ``shares``: samples of a step in force now, of everybody in
    ``expected``, at least one each; ``under_way``: whose reading is of a step that is not over. Such a one can only
    grow, so that it does is no outcome of a change."""
    slower, faster = changes.slower, changes.faster
    for key, (then_s, before_s) in changes.open.items():
        if key in readings and key not in under_way:
            lasted = abs(log(readings[key] / then_s)) < abs(log(readings[key] / before_s))
            if then_s > before_s:
                slower = _counted(slower, lasted)
            else:
                faster = _counted(faster, lasted)
    odd = {key: s for key, s in readings.items() if not expected[key][0] / ALIKE < s < expected[key][1] * ALIKE}
    usual = {key: (low * high) ** 0.5 for key, (low, high) in expected.items()}
    paces = {key: usual[key] if key in odd else readings.get(key, usual[key]) for key in expected}
    believed, again = set[Key](), set[Key]()
    for key in sorted(odd, key=lambda k: (-odd[k] / usual[k], k)):
        lasted_n, passed_n = slower if odd[key] > usual[key] else faster
        after = {**paces, key: odd[key]}
        if key in changes.open and changes.open[key][0] / ALIKE < odd[key] < changes.open[key][0] * ALIKE:
            again.add(key)
        elif not _pays(lasted_n / (lasted_n + passed_n), paces, after, shares):
            continue
        believed.add(key)
        paces = after
    unsettled = expected.keys() - (readings.keys() - set(under_way))
    still = {key: span for key, span in changes.open.items() if key in unsettled}
    opened = {key: (odd[key], usual[key]) for key in odd if key not in again}
    found = Changes(open={**still, **opened}, slower=slower, faster=faster)
    return found, frozenset(believed), frozenset(odd.keys() - believed)


def scored(
    score: float | None,
    proposed: Mapping[Key, int],
    readings: Mapping[Key, float],
    remaining_windows: float,
    trust: PolicyTrust,
) -> float:
    """Return the sum, in windows of healthy work, old ones fading, of what each look's proposal would have gained over
    equal shares by the *next* look's readings (of everybody): above 0, reacting pays here. It is judged whether it was
    in force or not, so what is tried costs nothing. (Not by readings of a step that is not over: what was proposed
    while it ran could not change it.) ``remaining_windows``: 0.0: nobody knows yet, so the job has just begun."""
    if score is None:  # what is seen first is acted on at once, where one wrong window costs next to nothing
        score = trust.first if not remaining_windows or remaining_windows > trust.long else 0.0
    score *= trust.fade
    if proposed and proposed.keys() == readings.keys():
        keys, total = list(readings), sum(proposed.values())
        pace = [readings[key] for key in keys]
        best_s = total / sum(1 / p for p in pace)
        score += best_s / step_s([proposed[key] for key in keys], pace) - best_s / step_s(even(total, len(keys)), pace)
    return max(-trust.bound, min(trust.bound, score))


def step_s(shares: Sequence[int], pace_s: Sequence[float]) -> float:
    """Return seconds that a step takes whose members have these shares and seconds per sample."""
    return max(n * p for n, p in zip(shares, pace_s, strict=True))


def _counted(counts: Span, lasted: bool) -> Span:
    fade = min(1.0, REMEMBERED / (sum(counts) + 1))
    return (counts[0] + lasted) * fade, (counts[1] + (not lasted)) * fade


def _pays(p: float, before: Mapping[Key, float], after: Mapping[Key, float], shares: Mapping[Key, int]) -> bool:
    keys = list(before)
    now, old, new = [shares[k] for k in keys], [before[k] for k in keys], [after[k] for k in keys]
    split = proportional(sum(now), [1 / pace for pace in new])
    gain, loss = step_s(now, new) - step_s(split, new), step_s(split, old) - step_s(now, old)
    return p * gain > (1 - p) * loss
