"""What members tell with their beats, over two windows of time: pure, time is passed in.

Beats carry counters that only grow (samples, seconds by phase) and medians since the beat before. What is wrong in them
(NaN, negative, a counter or a clock that went back) is dropped and counted; it never reaches a policy.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from everstep.model.observation import Pace, ProcessLoad

SHORT_S = 10.0
SUBWINDOWS = 6  # the long window has so many short ones
HISTORY = 30  # medians of short windows that are kept

MEDIANS = ("per_sample_s", "service_s")
COUNTERS = (
    "computed", "compute_s", "requests", "service_total_s", "held_s", "bytes_in", "bytes_out", "cpu_s", "throttled_s",
    "throttled",
)  # fmt: skip
AT_LEAST = "at_least_s"  # per sample of the step under way
GAUGES = (
    "rss_bytes", "peak_bytes", "batch", "accum", "global_batch", "loader_batch", "memory_batch", "rows", "cores",
    "row_bytes", "limit_bytes", "limit_used_bytes", "limit_kind",
)  # fmt: skip
PHASE = "phase."
_ABSURD = 1e15  # of anything: an hour is 3.6e3 s, a petabyte 1e15 bytes


class MemberWindows:
    """Holds the readings of one process. ``take`` its readings as they come, ask for the rest at any time; ``at`` in
    seconds."""

    def __init__(self, short_s: float = SHORT_S, subwindows: int = SUBWINDOWS) -> None:
        self.short_s, self.long_s = short_s, short_s * subwindows
        self.last: dict[str, float] = {}  # newest of every reading that is looked at
        self._beats: deque[tuple[float, dict[str, float]]] = deque()
        self._began: float | None = None
        self._index = 0
        self._medians: list[float] = []  # of the short window that is not over
        self._history: deque[float] = deque(maxlen=HISTORY)

    def __repr__(self) -> str:
        return f"<windows of {len(self._beats)} beats, {len(self._history)} sub-windows>"

    # ------------------------------------------------------------ in

    def take(self, readings: Mapping[str, float], at: float) -> str:
        """Take readings in; return why they were dropped, "" where they were not."""
        looked = {k: v for k, v in readings.items() if k in _LOOKED_AT or k.startswith(PHASE)}
        if (why := _wrong(looked)) is not None:
            return why
        if self._beats:
            before_at, before = self._beats[-1]
            if at < before_at:
                why = "the clock went back"
            elif at - before_at > self.long_s:
                why = "the clock jumped ahead"  # or nothing was heard for so long: old counters say nothing of now
            elif any(looked[k] < before[k] for k in looked.keys() & before.keys() if _counts(k)):
                why = "a counter went back"
            elif at == before_at:
                return ""
        if why:
            self._beats.clear()
            self._began, self._medians = None, []
        if self._began is None:
            self._began, self._index = at, 0
        self._turn(at)
        self._beats.append((at, looked))
        self.last.update(looked)
        while len(self._beats) > 2 and self._beats[1][0] <= at - self.long_s:
            self._beats.popleft()
        if why is None:
            self._medians += [looked[k] for k in MEDIANS if k in looked]
        return why or ""

    def _turn(self, at: float) -> None:
        """Close short windows that are over at ``at``."""
        assert self._began is not None
        index = int((at - self._began) // self.short_s)
        if index == self._index:
            return
        self._history.append(statistics.median(self._medians) if self._medians else 0.0)
        self._history.extend([0.0] * min(index - self._index - 1, HISTORY))
        self._index, self._medians = index, []

    # ------------------------------------------------------------ out

    @property
    def history(self) -> tuple[float, ...]:
        """Return the medians of the short windows that are over, newest last; 0.0: no reading in that one."""
        return tuple(self._history)

    def pace(self, at: float, long: bool = False, span_s: float = 0.0) -> Pace:
        """Return the pace of the window that ends at ``at`` (short, long, or so many seconds, at most the long one);
        empty where fewer than two beats are in it."""
        first, last, medians = self._span(at, min(span_s, self.long_s) or (self.long_s if long else self.short_s))
        if first is None or last is None:
            return Pace()
        # (the first beats of a process are before its first step, and tell no phases: what came since is of the window)
        phases = {k[len(PHASE) :]: max(0.0, v - first.get(k, 0.0)) for k, v in last.items() if k.startswith(PHASE)}
        return Pace(
            samples=int(_grown(first, last, "computed")),
            compute_s=_grown(first, last, "compute_s"),
            per_sample_s=statistics.median(found) if (found := medians["per_sample_s"]) else 0.0,
            at_least_s=last.get(AT_LEAST, 0.0),
            phases=phases,
        )

    def load(self, at: float, long: bool = False) -> ProcessLoad:
        """Return rates over the window that ends at ``at``."""
        first, last, medians = self._span(at, self.long_s if long else self.short_s)
        if first is None or last is None:
            return ProcessLoad()
        span_s = last["at"] - first["at"]
        return ProcessLoad(
            cpu_share=_grown(first, last, "cpu_s") / span_s,
            throttled_share=min(1.0, _grown(first, last, "throttled_s") / span_s),
            service_s=statistics.median(found) if (found := medians["service_s"]) else 0.0,
            queue=_grown(first, last, "held_s") / span_s,
            requests_per_s=_grown(first, last, "requests") / span_s,
            bytes_per_s=(_grown(first, last, "bytes_in") + _grown(first, last, "bytes_out")) / span_s,
        )

    def _span(
        self, at: float, span_s: float
    ) -> tuple[dict[str, float] | None, dict[str, float] | None, dict[str, list[float]]]:
        """Return the beats at both ends of a window (with ``at``), None: not two of different times; medians inside."""
        medians: dict[str, list[float]] = {name: [] for name in MEDIANS}
        first = last = None
        for beat in reversed(self._beats):  # (of thousands of members, every few seconds: nothing is copied here)
            then, readings = beat
            if last is None:
                if then < at - span_s:
                    break
                last = beat
            elif then < last[0]:
                first = beat
            if then <= at - span_s:
                break  # (its medians are of the time before)
            for name in MEDIANS:
                if name in readings:
                    medians[name].append(readings[name])
        return _with_time(first), _with_time(last), medians


class Windows:
    """Holds those of all members by name, and what was dropped of their readings: counts by reason."""

    def __init__(self, short_s: float = SHORT_S, subwindows: int = SUBWINDOWS) -> None:
        self.short_s, self._subwindows = short_s, subwindows
        self.dropped: dict[str, int] = {}
        self._members: dict[str, tuple[int, MemberWindows]] = {}
        self._reported: set[tuple[str, int, str]] = set()

    def __repr__(self) -> str:
        return f"<windows of {len(self._members)} members, {sum(self.dropped.values())} readings dropped>"

    def take(self, member: str, incarnation: int, readings: Mapping[str, float], at: float) -> str:
        """Take readings in; return why they were dropped, the first time for this process; else ""."""
        known = self._members.get(member)
        if known is not None and known[0] > incarnation:
            return ""
        if known is None or known[0] != incarnation:
            known = self._members[member] = (incarnation, MemberWindows(self.short_s, self._subwindows))
            self._reported = {t for t in self._reported if t[0] != member}
        why = known[1].take(readings, at)
        if not why:
            return ""
        self.dropped[why] = self.dropped.get(why, 0) + 1
        report = (member, incarnation, why)
        if report in self._reported:
            return ""
        self._reported.add(report)
        return why

    def of(self, member: str, incarnation: int) -> MemberWindows | None:
        known = self._members.get(member)
        return known[1] if known is not None and known[0] == incarnation else None

    def newest(self, member: str, incarnation: int) -> Mapping[str, float]:
        """Return the last good reading of each name of a process; {}: none."""
        found = self.of(member, incarnation)
        return found.last if found is not None else {}

    def keep(self, members: set[str]) -> None:
        """Forget all others."""
        for member in self._members.keys() - members:
            del self._members[member]


_LOOKED_AT = frozenset((*MEDIANS, *COUNTERS, *GAUGES, AT_LEAST))


def _with_time(beat: tuple[float, dict[str, float]] | None) -> dict[str, float] | None:
    """Return the readings of a beat, and its time as ``at``."""
    return None if beat is None else {**beat[1], "at": beat[0]}


def _counts(name: str) -> bool:
    return name in COUNTERS or name.startswith(PHASE)


def _wrong(readings: Mapping[str, float]) -> str | None:
    for name, value in readings.items():
        if not math.isfinite(value):
            return "not a number"
        if value < 0:
            return "negative"
        if value > _ABSURD:
            return "too large"
        if value == 0 and name in MEDIANS:
            return "zero"
    return None


def _grown(first: Mapping[str, float], last: Mapping[str, float], name: str) -> float:
    """Return how much a counter has grown; where it is missing at one end, 0."""
    return max(0.0, last[name] - first[name]) if name in first and name in last else 0.0
