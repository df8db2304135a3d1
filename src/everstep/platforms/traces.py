"""Plays recorded clouds: read recordings of machines that came and went, and play them. Pure: no clock, no files.

``parse_trace`` makes the life of every machine from the text of a recording. ``Timeline`` says when a moment of the
recording is played. ``TraceMarket`` gives machines to a job, and takes them back, as the recording says.

Three forms of recordings are read:

- JSON ``{"metadata": {"gap_seconds": g}, "data": [n0, n1, ...]}``: n_i machines were there at second i * g;
- CSV lines ``milliseconds,add|remove,name``, in order of time;
- CSV lines ``date, time, n``: n machines were there at that time; in any order.

A recording that only counts machines does not say which one a fall takes. It is drawn, always the same way.
"""

from __future__ import annotations

import datetime
import hashlib
import heapq
import json
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from everstep.errors import UserError
from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, Gone, Grant, Offer, Warned

MACHINES_MAX: Final = 10_000
EVENTS_MAX: Final = 1_000_000


class TraceError(UserError):
    """A recording is not what it should be."""


class MachineLife(NamedTuple):
    """Is one machine of a recording. Seconds since the start of the recording; ``end_s`` None: it outlived it."""

    begin_s: float
    end_s: float | None


class Trace(NamedTuple):
    """Is a recording. ``lives``: in the order in which machines came. ``length_s``: of the recording. ``most``:
    machines at a time."""

    lives: tuple[MachineLife, ...]
    length_s: float
    most: int

    @property
    def reclaims(self) -> int:
        """Return machines that were taken back."""
        return sum(life.end_s is not None for life in self.lives)


def parse_trace(text: str) -> Trace:
    """Return the machines of a recording. Raise TraceError with one line that names the place."""
    text = text.strip()
    if not text:
        raise TraceError("it is empty")
    if text.startswith("{"):
        return _from_counts(*_counts(text))
    first = text.split("\n", 1)[0].split(",")
    if len(first) == 3 and first[1].strip() in ("add", "remove"):
        return _from_names(text)
    if len(first) == 3:
        return _from_counts(*_dated_counts(text))
    raise TraceError(
        'it is no recording of machines: expected JSON with "data", or lines "milliseconds,add|remove,name" or '
        '"date, time, count"'
    )


def _counts(text: str) -> tuple[list[float], list[int], float]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"it is truncated, or no JSON: {error}") from None
    metadata = found.get("metadata")
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not isinstance(gap_s, int | float) or isinstance(gap_s, bool) or not 0 < gap_s < 1e7:
        raise TraceError(f"metadata.gap_seconds = {gap_s!r}: expected the seconds between two counts")
    data = found.get("data")
    if not isinstance(data, list) or not data or len(data) > EVENTS_MAX:
        raise TraceError(f"data: expected a list of 1 to {EVENTS_MAX:,} counts")
    for i, count in enumerate(data):
        _count(count, f"data[{i}]")
    return [i * float(gap_s) for i in range(len(data))], data, len(data) * float(gap_s)


def _count(count: object, where: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MACHINES_MAX:
        raise TraceError(f"{where} = {count!r}: expected how many machines there were, 0 to {MACHINES_MAX:,}")
    return count


def _dated_counts(text: str) -> tuple[list[float], list[int], float]:
    rows: dict[float, int] = {}
    for number, row in enumerate(text.split("\n"), 1):
        cells = [cell.strip() for cell in row.split(",")]
        try:
            day, clock, count = cells
            at = datetime.datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=datetime.UTC).timestamp()
            rows[at] = _count(int(count), f"line {number}")
        except ValueError:
            raise TraceError(f"line {number}: {row[:60]!r}: expected date, time, count") from None
    times = sorted(rows)
    return [at - times[0] for at in times], [rows[at] for at in times], times[-1] - times[0]


def _from_counts(times: Sequence[float], counts: Sequence[int], length_s: float) -> Trace:
    begun: list[float] = []
    ends: dict[int, float] = {}
    alive: list[int] = []
    for at, count in zip(times, counts, strict=True):
        while len(alive) > count:
            ends[alive.pop(_drawn(len(begun), len(ends), len(alive)))] = at
        while len(alive) < count:
            alive.append(len(begun))
            begun.append(at)
        if len(begun) > EVENTS_MAX:
            raise TraceError(f"more than {EVENTS_MAX:,} machines came")
    lives = tuple(MachineLife(at, ends.get(n)) for n, at in enumerate(begun))
    return Trace(lives, length_s, max(counts))


def _drawn(came: int, went: int, alive: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{came} {went}".encode(), digest_size=8).digest(), "big") % alive


def _from_names(text: str) -> Trace:
    begun: list[float] = []
    ends: dict[int, float] = {}
    alive: dict[str, int] = {}
    before, most = 0.0, 0
    for number, row in enumerate(text.split("\n"), 1):
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not cells[2]:
            raise TraceError(f"line {number}: {row[:60]!r}: expected milliseconds,add|remove,name; is it truncated?")
        try:
            at = int(cells[0]) / 1000
        except ValueError:
            raise TraceError(f"line {number}: {cells[0][:60]!r} is no time in milliseconds") from None
        name = cells[2]
        if not 0 <= at < 1e10:
            raise TraceError(f"line {number}: {cells[0]} ms is no time of a recording")
        if at < before:
            raise TraceError(f"line {number}: out of order: {cells[0]} ms comes after {before * 1000:.0f} ms")
        before = at
        if cells[1] == "add":
            if name in alive:
                raise TraceError(f"line {number}: {name!r} is added, and it is there already")
            alive[name] = len(begun)
            begun.append(at)
        elif name not in alive:
            raise TraceError(f"line {number}: {name!r} is removed, and no such machine is there")
        else:
            ends[alive.pop(name)] = at
        most = max(most, len(alive))
    return Trace(tuple(MachineLife(at, ends.get(n)) for n, at in enumerate(begun)), before, most)


# ------------------------------------------------------------ time


class Timeline:
    """Says when a moment of a recording is played: ``speed`` times as fast, and no pause between two events longer than
    ``quiet_s`` (0: pauses stay as long as they are)."""

    def __init__(self, moments: Sequence[float], speed: float, quiet_s: float = 0.0) -> None:
        """Take ``moments``: of all events of the recording, in seconds."""
        self._speed = speed
        self._recorded: list[float] = [0.0]
        self._played: list[float] = [0.0]
        for at in sorted(set(moments)):
            if at > self._recorded[-1]:
                pause_s = (at - self._recorded[-1]) / speed
                self._played.append(self._played[-1] + (min(pause_s, quiet_s) if quiet_s else pause_s))
                self._recorded.append(at)

    def __repr__(self) -> str:
        return f"<{self._recorded[-1]:.0f} s played in {self._played[-1]:.1f} s>"

    def played(self, recorded_s: float) -> float:
        """Return seconds from the start of playing to a moment of the recording."""
        return _between(recorded_s, self._recorded, self._played, 1 / self._speed)

    def recorded(self, played_s: float) -> float:
        """Return the moment of the recording that is played after so many seconds."""
        return _between(played_s, self._played, self._recorded, self._speed)


def _between(x: float, xs: Sequence[float], ys: Sequence[float], slope: float) -> float:
    """Return the line through the points, and beyond the last one with ``slope``."""
    i = max(0, bisect_right(xs, x) - 1)
    if i + 1 >= len(xs):
        return ys[-1] + (x - xs[-1]) * slope
    return ys[i] + (x - xs[i]) * (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])


def timeline_of(trace: Trace, speed: float, quiet_s: float = 0.0) -> Timeline:
    """Return the timeline on which ``trace`` is played."""
    ends = (life.end_s for life in trace.lives if life.end_s is not None)
    return Timeline([*(life.begin_s for life in trace.lives), *ends], speed, quiet_s)


# ------------------------------------------------------------ the market


class TraceMarket:
    """Gives machines to one job, and takes them back, as a recording says. Pure: times are seconds of playing.

    The job asks for a number of machines. It gets those that are there, in the order in which they came, under the
    names ``spot-1``, ``spot-2``, ...: the lowest that is free. ``lead_s``: seconds between a notice and the end of its
    machine, of playing; 0: machines go without a word. A machine that comes later than its notice is due is granted
    and warned at once."""

    def __init__(self, trace: Trace, timeline: Timeline, offer: Offer, lead_s: float = 0.0) -> None:
        self.trace, self.timeline, self._offer, self._lead_s = trace, timeline, offer, lead_s
        self._wanted = 0
        self._there: dict[int, None] = {}  # those that the job may still get, in the order in which they came
        self._held: dict[int, NodeId] = {}
        self._names: list[int] = []  # heap: numbers of names that were given and are free again
        self._named = 0
        self._now = 0.0
        # (time, ends before begins, machine): the same moment may take machines and bring others
        self._due: list[tuple[float, int, int]] = []
        for n, life in enumerate(trace.lives):
            if life.end_s is not None and life.end_s <= life.begin_s:
                continue
            self._due.append((timeline.played(life.begin_s), _BEGINS, n))
            if life.end_s is not None:
                self._due.append((timeline.played(life.end_s), _ENDS, n))
        heapq.heapify(self._due)

    def __repr__(self) -> str:
        return f"<trace at {self._now:.1f} s: {len(self._there)} machines to be had, {len(self._held)} held>"

    @property
    def held(self) -> frozenset[NodeId]:
        """Return nodes that the job has now."""
        return frozenset(self._held.values())

    @property
    def due_at(self) -> float | None:
        """When the next machine comes, goes or is warned; None: never again."""
        return self._due[0][0] if self._due else None

    def offers(self) -> tuple[Offer, ...]:
        """Return what could be had now, beyond what is held."""
        free, offer = len(self._there), self._offer
        return (Offer(offer.hardware, offer.zone, offer.market, offer.price, free),) if free else ()

    def request(self, count: int) -> None:
        """The job wants ``count`` machines from now on, those that it has among them. If it has more, it gives the
        newest back; it may get them again."""
        self._wanted = count
        for n in list(self._held)[count:]:
            self._give_up(n)
            self._there[n] = None

    def release(self, node: NodeId) -> None:
        """The job gives a machine back, and does not want this one again."""
        for n in [n for n, name in self._held.items() if name == node]:
            self._give_up(n)

    def until(self, now: float) -> list[CapacityNews]:
        """Return what happens up to ``now``, in order."""
        out: list[CapacityNews] = self._fill()
        while self._due and self._due[0][0] <= now:
            at, kind, n = heapq.heappop(self._due)
            self._now = max(self._now, at)
            if kind == _BEGINS:
                self._there[n] = None
            elif kind == _ENDS:
                self._there.pop(n, None)
                if n in self._held:
                    out.append(Gone(self._give_up(n), self._recorded()))
            elif n in self._held:
                end_s = self.trace.lives[n].end_s
                in_s = self.timeline.played(end_s) - self._now if end_s is not None else None
                out.append(Warned(self._held[n], in_s, self._recorded()))
            if not self._due or self._due[0][0] > at:  # (a moment is one: what comes with it replaces what goes)
                out += self._fill()
        self._now = max(self._now, now)
        return out

    def _recorded(self) -> float:
        return self.timeline.recorded(self._now)

    def _fill(self) -> list[CapacityNews]:
        out: list[CapacityNews] = []
        while self._there and len(self._held) < self._wanted:
            n = next(iter(self._there))
            del self._there[n]
            self._held[n] = node = self._name()
            out.append(Grant(node, self._offer, self._recorded()))
            end_s = self.trace.lives[n].end_s
            if end_s is not None and self._lead_s > 0:
                heapq.heappush(self._due, (max(self._now, self.timeline.played(end_s) - self._lead_s), _WARNS, n))
        return out

    def _name(self) -> NodeId:
        """Return the lowest name that is free."""
        if self._names:
            return NodeId(f"spot-{heapq.heappop(self._names)}")
        self._named += 1
        return NodeId(f"spot-{self._named}")

    def _give_up(self, n: int) -> NodeId:
        node = self._held.pop(n)
        heapq.heappush(self._names, int(node.removeprefix("spot-")))
        return node


_ENDS, _BEGINS, _WARNS = 0, 1, 2


def price_class(stem: str) -> tuple[str, str]:
    """Return class and zone in the name of a recording: ``us-east-1f_v100_1`` -> ("v100", "us-east-1f"), of several
    accelerators ``k80x8``. Of another name: itself without ``-trace``, and no zone."""
    parts = stem.split("_")
    if len(parts) == 3 and parts[2].isdigit() and stem.isprintable():
        return (f"{parts[1]}x{parts[2]}" if parts[2] != "1" else parts[1]), parts[0]
    return "".join(c for c in stem.removesuffix("-trace") if c.isprintable())[:100], ""
