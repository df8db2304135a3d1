"""Says which faults are made when: schedules in files, and recorded slowdowns of real clusters. Pure.

A schedule has a line for each thing, ``SECONDS, WHAT``; ``#`` begins a comment:

    0,   slow worker:1 factor=4 for=60s
    30,  stop ps:0 for=5s
    45,  kill worker:?
    90,  heal

``worker:?`` is one of those that there are, chosen by the seed. A recording (``index,worker,gpu,time,batch_time_norm``,
as in the mini-batch times of Alibaba PAI) becomes factors: a worker's time over the median of all in that iteration.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from everstep.errors import ConfigError
from everstep.units import seconds

LINES_MAX = 100_000
_SAYS = {"slow": ("factor", "for"), "stop": ("for",), "kill": (), "heal": ()}
CHANGED = 0.1  # factors closer together than so (relatively) are one


class Planned(msgspec.Struct, frozen=True):
    """Plans, at ``at_s`` seconds, ``what`` (slow, kill, stop, heal) to ``target`` ("" with heal: to all)."""

    at_s: float
    what: str
    target: str = ""
    factor: float = 1.0
    for_s: float = 0.0

    def __str__(self) -> str:
        words = [self.what, self.target]
        if self.what == "slow":
            words.append(f"{self.factor:.3g}x")
        if self.what in ("slow", "stop"):
            words.append(f"for {self.for_s:.3g} s")
        return " ".join(w for w in words if w)


def parse_schedule(text: str, name: str = "schedule") -> list[Planned]:
    """Parse a schedule, in order of time. Raises ConfigError that names the line."""
    found: list[Planned] = []
    lines = text.splitlines()
    if len(lines) > LINES_MAX:
        raise ConfigError(f"{name}: {len(lines)} lines; at most {LINES_MAX}")
    for number, line in enumerate(lines, 1):
        body = line.partition("#")[0].strip()
        if not body:
            continue
        at, comma, what = body.partition(",")
        try:
            if not comma:
                raise ConfigError("needs SECONDS, WHAT")
            found.append(parse_one(seconds(at), what.split()))
        except ConfigError as error:
            raise ConfigError(f"{name}, line {number}: {body!r}: {error}") from None
    if not found:
        raise ConfigError(
            f"{name}: says nothing; give it lines of SECONDS, WHAT, such as 30, slow worker:1 factor=4 for=60s"
        )
    return sorted(found, key=lambda p: p.at_s)


def parse_one(at_s: float, words: Sequence[str]) -> Planned:
    """Parse one line: ``slow worker:1 factor=4 for=60s``. Raises ConfigError."""
    what = words[0] if words else ""
    if what not in ("slow", "kill", "stop", "heal"):
        raise ConfigError(f"{what!r} is not slow, kill, stop or heal")
    target, rest = "", list(words[1:])
    if rest and "=" not in rest[0]:
        target = rest.pop(0)
        role, _, slot = target.partition(":")
        if role not in ("worker", "ps") or not (slot == "?" or (slot.isascii() and slot.isdigit())):
            raise ConfigError(f"{target!r} is no member; name one as worker:1, ps:0 or worker:?")
    if not target and what != "heal":
        raise ConfigError(f"{what} whom? name one as worker:1, ps:0 or worker:?")
    factor, for_s = 1.0, 0.0
    for word in rest:
        key, _, value = word.partition("=")
        if key in ("factor", "for") and key not in _SAYS[what]:
            raise ConfigError(f"{word!r} says nothing about {what}")
        if key == "factor":
            factor = _number(value)
        elif key == "for":
            for_s = seconds(value)
        else:
            raise ConfigError(f"{word!r} is neither factor=N nor for=SECONDS")
    if what == "slow" and not 1.0 < factor <= 1000.0:
        raise ConfigError(f"factor {factor:g}: must be above 1 and at most 1000")
    if what in ("slow", "stop") and for_s <= 0:
        raise ConfigError(f"{what} needs for=SECONDS above 0")
    return Planned(at_s, what, target, factor, for_s)


def choose(plan: Planned, members: Iterable[str], rng: random.Random) -> Planned | None:
    """``worker:?`` becomes one of ``members``; None: there is none of that role."""
    role, _, slot = plan.target.partition(":")
    if slot != "?":
        return plan
    there = sorted(m for m in members if m.partition(":")[0] == role)
    return msgspec.structs.replace(plan, target=rng.choice(there)) if there else None


# ------------------------------------------------------------ recordings


def parse_recording(lines: Iterable[str], name: str = "recording") -> list[list[float]]:
    """Return factors (>= 1) of each worker, iteration by iteration: a worker's time over the median of all in its n-th
    row. Raises ConfigError."""
    times: dict[str, list[float]] = {}
    reader = csv.DictReader(lines)
    if reader.fieldnames is None or not {"worker", "batch_time_norm"} <= set(reader.fieldnames):
        raise ConfigError(f"{name}: needs the columns worker and batch_time_norm (mini-batch times of Alibaba PAI)")
    for number, row in enumerate(reader, 2):
        try:
            value = _number(row["batch_time_norm"] or "")
        except ConfigError as error:
            raise ConfigError(f"{name}, line {number}: batch_time_norm {error}") from None
        times.setdefault(str(row["worker"]), []).append(value)
        if number > LINES_MAX:
            raise ConfigError(f"{name}: more than {LINES_MAX} rows; give an excerpt")
    length = min((len(t) for t in times.values()), default=0)
    if not length:
        raise ConfigError(f"{name}: has no rows")
    workers = [times[k] for k in sorted(times, key=lambda k: (len(k), k))]
    out: list[list[float]] = [[] for _ in workers]
    for i in range(length):
        column = [w[i] for w in workers]
        median = statistics.median(column)
        for mine, value in zip(out, column, strict=True):
            mine.append(max(1.0, value / median) if median > 0 else 1.0)
    return out


def plan_recording(factors: Sequence[Sequence[float]], every_s: float, workers: Mapping[int, str]) -> list[Planned]:
    """A recording as a schedule: iteration i is played from ``i * every_s`` on, row k to member ``workers[k]``. Factors
    that hardly change are one order."""
    found: list[Planned] = []
    for k, target in workers.items():
        row = factors[k]
        begin = 0
        for i in range(1, len(row) + 1):
            if i < len(row) and abs(row[i] - row[begin]) <= CHANGED * row[begin]:
                continue
            if row[begin] > 1.0 + CHANGED:
                for_s = (i - begin) * every_s
                found.append(Planned(begin * every_s, "slow", target, min(row[begin], 1000.0), for_s))
            begin = i
    return sorted(found, key=lambda p: (p.at_s, p.target))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{text!r} is not a number of 0 or more")
    return value
