"""Has ``auto``: workers and ps are scaled together, to what one fitted model of the job's speed says is best.

At each look with good readings the policy adds the rate at the present size to the model (``policies.speed_model``). It
asks for another size only if the model says, with its uncertainty, that this pays. Each change is then judged by the
readings after it, like all others. A job gets at most ``AutoSettings.changes`` changes. The last one only goes to a
size that was measured, or that is as good as certain to be better.

What policy ``memory`` asks for comes first, is not counted, and bounds the number of ps from below.
"""

from __future__ import annotations

import math
import statistics
from typing import Final, NamedTuple

import msgspec

from everstep.model.decision import Decision
from everstep.model.observation import Observations
from everstep.model.plan import Plan, Scale
from everstep.policies.memory_growth import GrowthState, memory_growth
from everstep.policies.speed_model import SizeSeen, SpeedModel

Size = tuple[int, int]
"""Is (workers, ps)."""

WEIGHTS: Final = {"time": 0.0, "waste": 0.5, "cost": 1.0}
"""How much a process more must bring: samples/s over the processes to this power is made largest."""

_KEPT: Final = 8  # windows of a size that count, the newest
_TRIED: Final = 12  # numbers of a role that are compared at a look
_OWN: Final = ("forward", "backward", "update")


class AutoSettings(msgspec.Struct, frozen=True):
    """Says when ``auto`` acts. Shares are of a rate or a score."""

    changes: int = 6  # of size, in the whole job
    gain: float = 0.05  # that a larger size must promise
    near: float = 0.03  # sizes this close to the best count as equal, and the smallest is taken
    chance: float = 0.5  # with which a larger size must bring anything at all
    sure: float = 0.9  # with which a smaller size must lose nothing worth a word
    shift: float = 0.2  # by which two windows in a row must differ from those before: then all before is forgotten
    lie: float = 3.0  # times that workers' rates may differ from the samples that are done


class AutoState(msgspec.Struct):
    """Holds what the policy knows of the job. ``size``: of the last look; ``windows``: whole ones at this size."""

    windows_of: dict[Size, list[WindowRead]] = {}
    size: Size = (0, 0)
    windows: int = 0
    changes: int = 0
    odd: int = 0  # windows in a row that differ from those before
    last_words: str = ""  # the last thing that was said without a change
    at: float = 0.0  # of the last look
    remaining: int = 0
    growth: GrowthState | None = None  # of the tables


class WindowRead(msgspec.Struct, frozen=True):
    """Is one window of the whole job: samples/s, shares of the workers' time, own seconds for a sample."""

    rate: float
    data: float
    ps: float
    own_s: float


class _Choice(NamedTuple):
    size: Size
    score: float


def auto(
    seen: Observations, state: AutoState | None, settings: AutoSettings = AutoSettings()
) -> tuple[Plan | None, AutoState]:
    """Ask for another size if that pays, or if a ps would be full with this one."""
    state = msgspec.structs.replace(state, windows_of=dict(state.windows_of)) if state is not None else AutoState()
    fuller, state.growth = memory_growth(seen, state.growth)
    if fuller is not None:
        return fuller, state
    seen = msgspec.structs.replace(seen, min_ps=max(seen.min_ps, state.growth.least_ps))
    size = (seen.wanted_workers, seen.wanted_ps)
    since_s, done = seen.at - state.at, state.remaining - seen.remaining_samples
    known = state.at > 0 and state.remaining > 0 and seen.remaining_samples > 0 and since_s > 0
    state.at, state.remaining = seen.at, seen.remaining_samples
    if size != state.size:
        state.size, state.windows, state.odd = size, 0, 0
    read = read_window(seen)
    if read is None or not is_steady(seen):
        state.windows = 0
        return None, state
    state.windows += 1
    if state.windows < 2:  # (the first one has the change in it)
        return None, state
    if known and done > 0 and not 1 / settings.lie <= read.rate * since_s / done <= settings.lie:
        words = (
            f"workers tell {read.rate:,.0f} samples/s, but {done / since_s:,.0f} are done: these readings do not count"
        )
        return _say(state, "readings", words, {"told": read.rate, "done": done / since_s})
    _keep(state, size, read, settings)
    model = SpeedModel({at: size_seen(windows) for at, windows in state.windows_of.items()})
    if not model.fits:
        words = f"no model of speed fits this job: the best misses by {100 * model.misfit:.0f} %; its size stays"
        return _say(state, "misfit", words, {"misfit": model.misfit, "sizes": len(model.seen)})
    return _decide(seen, state, model, settings)


# ---------------------------------------------------------------- readings


def read_window(seen: Observations) -> WindowRead | None:
    """Return the job's window; None: a worker has no reading, or one that cannot be true."""
    rates, all_s, data_s, ps_s, own_s, samples = [], 0.0, 0.0, 0.0, 0.0, 0
    for worker in seen.workers:
        pace = worker.short
        spans = list(pace.phases.values())
        whole_s = sum(spans)
        if pace.samples <= 0 or not math.isfinite(whole_s) or whole_s <= 0 or min(spans) < 0:
            return None
        rates.append(pace.samples / whole_s)
        all_s += whole_s
        data_s += pace.phases.get("data", 0.0) + pace.phases.get("barrier", 0.0)
        ps_s += pace.phases.get("pull", 0.0) + pace.phases.get("push", 0.0)
        own_s += sum(pace.phases.get(name, 0.0) for name in _OWN)
        samples += pace.samples
    if not rates or max(rates) > 100 * statistics.median(rates):
        return None
    return WindowRead(sum(rates), data_s / all_s, ps_s / all_s, own_s / samples)


def is_steady(seen: Observations) -> bool:
    """Return whether all who are wanted were up during the whole window, and nobody is on the way."""
    if seen.pending or len(seen.workers) != seen.wanted_workers or len(seen.servers) != seen.wanted_ps:
        return False
    since = [*(w.since for w in seen.workers), *(s.since for s in seen.servers)]
    return max(since, default=0.0) <= seen.at - seen.window_s and all(s.partitions > 0 for s in seen.servers)


def _keep(state: AutoState, size: Size, read: WindowRead, settings: AutoSettings) -> None:
    """Add a window. If two in a row differ from those before at this size, the job has changed: forget the rest."""
    before = state.windows_of.get(size, [])
    typical = statistics.median(w.rate for w in before) if before else read.rate
    state.odd = state.odd + 1 if abs(read.rate / typical - 1) > settings.shift else 0
    if state.odd >= 2:
        state.odd = 0
        state.windows_of = {size: [before[-1], read]}
        return
    state.windows_of[size] = [*before, read][-_KEPT:]


def size_seen(windows: list[WindowRead]) -> SizeSeen:
    median = statistics.median
    return SizeSeen(
        tuple(w.rate for w in windows),
        median(w.data for w in windows),
        median(w.ps for w in windows),
        median(w.own_s for w in windows),
    )


# ---------------------------------------------------------------- the choice


def _decide(
    seen: Observations, state: AutoState, model: SpeedModel, settings: AutoSettings
) -> tuple[Plan | None, AutoState]:
    now = state.size
    left = settings.changes - state.changes
    power = WEIGHTS[seen.optimize]

    def score(size: Size) -> float:
        return float(model.speed(*size).mean / sum(size) ** power)

    sizes = {now, *candidates(seen, now, 2 if len(model.seen) == 1 else 4)}
    sizes |= {at for at in model.seen if within(seen, at)}
    if left == 1:  # the last change goes to what is known, or to what is as good as certain
        sure = settings.sure
        sizes = {
            at for at in sizes if at == now or at in model.seen or model.chance(at, now, 1 + settings.gain) >= sure
        }
    choices = [_Choice(at, score(at)) for at in sizes]
    best = max(choice.score for choice in choices)
    near = [choice for choice in choices if choice.score >= (1 - settings.near) * best]
    chosen = min(near, key=lambda c: (sum(c.size), -c.score))
    if chosen.size == now or left <= 0 or not _pays(model, now, chosen, power, settings, score(now)):
        return _rest(seen, state, model, left)
    state.changes += 1
    return _change(seen, model, now, chosen.size, left - 1), state


def _pays(
    model: SpeedModel, now: Size, chosen: _Choice, power: float, settings: AutoSettings, score_now: float
) -> bool:
    """Return whether a change from one size to another is worth it."""
    to, gain = chosen.size, chosen.score / score_now
    fewer = (sum(to) / sum(now)) ** power
    if sum(to) < sum(now):
        saves = gain >= 1 + settings.gain or sum(to) <= 0.9 * sum(now)
        return saves and model.chance(to, now, (1 - settings.near) * fewer) >= settings.sure
    return gain >= 1 + settings.gain and model.chance(to, now, (1 + settings.near) * fewer) >= settings.chance


def _bounds(seen: Observations) -> tuple[Size, Size]:
    """Return the fewest and the most workers, and the fewest and the most ps, that a job may have."""
    workers = max(1, seen.min_workers), max(seen.max_workers, seen.wanted_workers)
    return workers, (max(1, seen.min_ps), max(seen.max_ps, seen.wanted_ps)) if seen.wanted_ps else (0, 0)


def within(seen: Observations, size: Size) -> bool:
    """Return whether a job may have this size."""
    if not all(least <= count <= most for count, (least, most) in zip(size, _bounds(seen), strict=True)):
        return False
    return not seen.max_memory_bytes or memory_of(seen, size) <= seen.max_memory_bytes


def memory_of(seen: Observations, size: Size) -> float:
    """Return the resident bytes that all workers and ps would have: a process more takes what the largest one of its
    role takes beside its rows, and the rows of all ps stay what they are."""
    rows = sum(s.row_bytes for s in seen.servers)
    own = max((s.rss_bytes - s.row_bytes for s in seen.servers), default=0)
    return size[0] * max((w.rss_bytes for w in seen.workers), default=0) + size[1] * max(0, own) + rows


def candidates(seen: Observations, now: Size, factor: int) -> list[Size]:
    """Return the sizes that one change may lead to: at most ``factor`` times, and at least half of each role."""
    workers, ps = (_counts(count, *bounds, factor) for count, bounds in zip(now, _bounds(seen), strict=True))
    return [(w, p) for w in workers for p in ps if within(seen, (w, p))]


def _counts(now: int, least: int, most: int, factor: int) -> list[int]:
    low, high = max(least, -(-now // 2)), min(most, factor * now)
    if high - low < _TRIED:
        return list(range(low, high + 1))
    step = (high / low) ** (1 / (_TRIED - 1))
    return sorted({now, *(round(low * step**i) for i in range(_TRIED))})


# ---------------------------------------------------------------- words


def words_of(size: Size) -> str:
    """Return a size in words."""
    return f"{size[0]} workers" + (f" and {size[1]} ps" if size[1] else "")


BINDS: Final = {"workers": "what each worker computes", "shared": "what all workers share", "ps": "the ps"}


def _binding(model: SpeedModel, size: Size) -> tuple[str, dict[str, float]]:
    shares = model.binding(*size)
    most = max(shares, key=lambda name: shares[name])
    return f"{BINDS[most]} ({100 * shares[most]:.0f} % of the time)", shares


def _change(seen: Observations, model: SpeedModel, now: Size, to: Size, left: int) -> Plan:
    speed, rate = model.speed(*to), model.speed(*now).mean
    binds, shares = _binding(model, now)
    low, high = 100 * (speed.low / rate - 1), 100 * (speed.high / rate - 1)
    instead = f"{words_of(to)} instead of {words_of(now)}"
    reason = f"{binds} binds now: {instead} would change the speed by {low:+.0f} to {high:+.0f} %"
    rejected = []
    for other in {(to[0], now[1]), (now[0], to[1])} - {now, to}:
        rejected.append(f"{words_of(other)}: {100 * (model.speed(*other).mean / rate - 1):+.0f} %")
    inputs: dict[str, str | int | float | bool] = {
        "samples_per_s": round(rate, 1),
        "expected": round(speed.mean, 1),
        "low": round(speed.low, 1),
        "high": round(speed.high, 1),
        "optimize": seen.optimize,
        "changes_left": left,
    }
    inputs |= {f"binds_{name}": round(share, 3) for name, share in shares.items()}
    scale = Scale(workers=to[0], ps=to[1] if to[1] != now[1] else 0)
    return Plan(actions=(scale,), decision=Decision("scale", reason, inputs, tuple(sorted(rejected))))


def _rest(seen: Observations, state: AutoState, model: SpeedModel, left: int) -> tuple[Plan | None, AutoState]:
    """Say once that a size is kept, and why."""
    size = state.size
    binds, shares = _binding(model, size)
    words = f"{words_of(size)} stay: {binds} binds, and no size within the bounds promises enough"
    if left <= 0:
        words = f"{words_of(size)} stay: all changes are used; {binds} binds"
    inputs = {"samples_per_s": model.speed(*size).mean, "changes_left": float(left)}
    return _say(state, f"rest {size}", words, inputs | {f"binds_{name}": share for name, share in shares.items()})


def _say(state: AutoState, what: str, words: str, inputs: dict[str, float]) -> tuple[Plan | None, AutoState]:
    """Return a plan without actions, which is only said, unless this was said last."""
    if state.last_words == what:
        return None, state
    state.last_words = what
    shown: dict[str, str | int | float | bool] = {name: round(value, 3) for name, value in inputs.items()}
    return Plan(actions=(), decision=Decision("keep the size", words, shown)), state
