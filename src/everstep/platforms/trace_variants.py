"""Makes recordings out of recordings: from another moment on, of more machines, of machines that go by chance. Pure.

One recording is one story. A job that begins at another moment of it meets other reclaims, and so the spread of a
forecast comes from what a cloud did, and not from a distribution that somebody assumed.
"""

from __future__ import annotations

import random

from everstep.platforms.traces import MACHINES_MAX, MachineLife, Trace, TraceError


def from_moment(trace: Trace, moment_s: float) -> Trace:
    """Return the recording as it is for a job that begins at ``moment_s`` of it. What came before follows after its
    end: machines that are there at the end of the recording go on as those that are there at its begin, as many as
    there are of both."""
    length_s = trace.length_s
    moment_s = moment_s % length_s if length_s > 0 else 0.0
    if moment_s <= 0:
        return trace
    lives = [(life.begin_s, length_s if life.end_s is None else life.end_s) for life in trace.lives]
    lasting = [n for n, (_, end_s) in enumerate(lives) if end_s >= length_s]
    first = [n for n, (begin_s, _) in enumerate(lives) if begin_s <= 0]
    goes_on = dict(zip(lasting, first, strict=False))
    followed = set(goes_on.values())
    twice = [(begin_s, end_s) for n, (begin_s, end_s) in enumerate(lives) if n not in goes_on]
    twice += [(lives[n][0], length_s + lives[after][1]) for n, after in goes_on.items()]
    twice += [(begin_s + length_s, end_s + length_s) for n, (begin_s, end_s) in enumerate(lives) if n not in followed]
    out = []
    for begin_s, end_s in sorted((max(0.0, begin - moment_s), end - moment_s) for begin, end in twice):
        if end_s > begin_s and begin_s < length_s:
            out.append(MachineLife(begin_s, end_s if end_s < length_s else None))
    return Trace(tuple(out), length_s, most_of(out))


def between(trace: Trace, begin_s: float, end_s: float) -> Trace:
    """Return a part of the recording. Machines that are there when it begins come with its begin; those that are there
    when it ends are not taken back. Raise TraceError if it is no part."""
    if not 0 <= begin_s < end_s <= trace.length_s:
        raise TraceError(f"from {begin_s:g} to {end_s:g} s: the recording has 0 to {trace.length_s:g} s")
    lives = []
    for life in trace.lives:
        gone_s = trace.length_s + 1 if life.end_s is None else life.end_s
        if life.begin_s < end_s and gone_s > begin_s:
            lives.append(MachineLife(max(0.0, life.begin_s - begin_s), gone_s - begin_s if gone_s < end_s else None))
    return Trace(tuple(lives), end_s - begin_s, most_of(lives))


def most_of(lives: list[MachineLife]) -> int:
    """Return how many machines there are at a time, at most."""
    changes = sorted([(life.begin_s, 1) for life in lives] + [(x.end_s, -1) for x in lives if x.end_s is not None])
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most


def repeated(trace: Trace, machines: int, seed: int = 0) -> Trace:
    """Return a recording of so many machines at a time, at most: copies of this one, each from a moment of its own.
    Raise TraceError if there cannot be so many."""
    if not 1 <= machines <= MACHINES_MAX:
        raise TraceError(f"{machines} machines: expected 1 to {MACHINES_MAX:,}")
    if not trace.most:
        raise TraceError("it never has a machine")
    rng = random.Random(seed)
    lives: list[MachineLife] = []
    left = machines
    while left > 0:
        copy = from_moment(trace, rng.random() * trace.length_s)
        if copy.most > left:
            copy = at_most(copy, left)
        lives += copy.lives
        left -= max(1, min(copy.most, left))
    lives.sort(key=lambda life: life.begin_s)
    return Trace(tuple(lives), trace.length_s, most_of(lives))


def at_most(trace: Trace, machines: int) -> Trace:
    """Return the recording with the first machines that fit at each moment, and without the others."""
    kept: list[MachineLife] = []
    ends: list[float] = []
    for life in trace.lives:
        ends = [end_s for end_s in ends if end_s > life.begin_s]
        if len(ends) < machines:
            kept.append(life)
            ends.append(float("inf") if life.end_s is None else life.end_s)
    return Trace(tuple(kept), trace.length_s, most_of(kept))


def by_chance(machines: int, length_s: float, between_s: float, back_s: float, seed: int) -> Trace:
    """Return machines each of which goes after ``between_s`` seconds on average, at any moment as likely as at any
    other, and is replaced ``back_s`` later."""
    rng = random.Random(seed)
    lives: list[MachineLife] = []
    for _ in range(machines):
        begin_s = 0.0
        while begin_s < length_s:
            end_s = begin_s + max(1.0, rng.expovariate(1 / between_s))
            lives.append(MachineLife(begin_s, end_s if end_s < length_s else None))
            begin_s = end_s + back_s
    lives.sort(key=lambda life: life.begin_s)
    return Trace(tuple(lives), length_s, machines)
