"""Judges who is slow, how much, and why, in words: of what was observed. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from everstep.model.job_view import Judged, RunningFault
from everstep.model.member import Role
from everstep.model.observation import Observations, ServerSeen, WorkerSeen
from everstep.monitor.stepclock import NEWS

NOTICED = 1.2  # times the others' median, from which on it is worth a word
QUEUE = 2.0  # requests that wait
THROTTLED = 0.05
WAITS = 0.3  # of its time a worker waits in one phase

_WAITING = {
    "data": "waits for its data",
    "pull": "waits for rows",
    "push": "hands gradients over",
    "barrier": "waits for the others",
}


def fault_words(fault: RunningFault, at: float) -> str:
    """Return a fault in words: ``4 times slower for 30 s more``; ``at``: now, seconds."""
    what = f"{fault.factor:g} times slower" if fault.what == "slow" else "stopped"
    return f"{what} for {fault.until - at:.0f} s more"


def judge(seen: Observations, faults: Iterable[tuple[str, str]] = ()) -> list[Judged]:
    """Judge everybody, slowest first. ``faults``: (member, words) of those that last."""
    faulty = dict(faults)
    found: list[Judged] = []
    # of the long window where a step takes longer than the short one: so policies see it, too
    paces = {w.slot: w.short.per_sample_s or w.long.per_sample_s for w in seen.workers}
    for w in seen.workers:
        peers = [paces[p.slot] for p in seen.workers if p.hardware == w.hardware]
        found.append(_judge(w, paces[w.slot], peers, _worker_words(w), "compute", "no reading yet", faulty))
    for s in seen.servers:
        peers = [p.service_s for p in seen.servers if p.hardware == s.hardware]
        idle = "no requests now" if s.long_load.service_s else "no requests yet"
        found.append(_judge(s, s.service_s, peers, _server_words(s), "service", idle, faulty))
    return sorted(found, key=lambda j: (-j.slowness, j.member))


def by_the_step_under_way(workers: Sequence[WorkerSeen]) -> tuple[WorkerSeen, ...]:
    """Who computes a step that already takes clearly longer than others' steps, and than its own before, is known by
    that as long as there is no newer reading: the end of that step may be far."""
    paces = [w.short.per_sample_s or w.long.per_sample_s for w in workers]
    known = [s for s in paces if s > 0]
    usual_s = statistics.median_low(known) if known else math.inf

    def by_it(w: WorkerSeen, own_s: float) -> WorkerSeen:
        least_s = w.short.at_least_s
        if least_s <= NEWS * max(own_s, usual_s):
            return w
        return msgspec.structs.replace(w, short=msgspec.structs.replace(w.short, per_sample_s=least_s))

    return tuple(map(by_it, workers, paces))


def _judge(
    m: WorkerSeen | ServerSeen,
    seconds: float,
    peers: list[float],
    words: list[str],
    what: str,
    idle: str,
    faulty: dict[str, str],
) -> Judged:
    member, role = str(m), Role.WORKER if isinstance(m, WorkerSeen) else Role.PS
    known = [p for p in peers if p > 0]
    # The lower one of two: of two members the slow one must not hide in their mean.
    slowness = seconds / statistics.median_low(known) if seconds > 0 and known else 0.0
    if seconds <= 0:
        words = [idle, *words]
    elif slowness >= NOTICED:
        words = [f"{what} {slowness:.1f}x the median of its class", *words]
    if member in faulty:
        words.append(f"fault: {faulty[member]}")
    return Judged(member, slowness, seconds, ", ".join(words), role, m.slot)


def _worker_words(w: WorkerSeen) -> list[str]:
    words = _process_words(w)
    total = sum(v for k, v in w.short.phases.items() if k != "outside")
    for phase, text in _WAITING.items():
        share = w.short.phases.get(phase, 0.0) / total if total > 0 else 0.0
        if share >= WAITS:
            words.append(f"{text} {share:.0%} of the time")
    return words


def _server_words(s: ServerSeen) -> list[str]:
    return ([f"queue {s.queue:.0f}"] if s.queue >= QUEUE else []) + _process_words(s)


def _process_words(m: WorkerSeen | ServerSeen) -> list[str]:
    return [f"throttled {m.throttled_share:.0%}"] if m.throttled_share >= THROTTLED else []
