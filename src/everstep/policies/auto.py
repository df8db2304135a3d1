"""Has ``auto``: workers and ps are scaled together, to what one fitted model of the job's speed says is best.

At each look with good readings the policy adds the rate at the present size to the model (``policies.speed_model``). It
asks for another size only if the model says, with its uncertainty, that this pays. Each change is then judged by the
readings after it, like all others. A job gets at most ``AutoSettings.changes`` changes; a plan that was not followed is
none. The last one only goes to a size that was measured, or that is as good as certain to be better.

What policy ``memory`` asks for comes first, is not counted, and bounds the number of ps from below.
"""

from __future__ import annotations

import math
import statistics
from typing import Final, NamedTuple

import msgspec

from everstep.model.decision import Decision
from everstep.model.observation import Observations, WorkerSeen
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
_TRAINED: Final = 0.7  # of a window, of which a worker's clock must tell
_YOUNG: Final = 6  # windows, for which a process is young
_WAITS: Final = 6  # doublings, at most, of the wait after a plan that was not followed


class AutoSettings(msgspec.Struct, frozen=True):
    """Says when ``auto`` acts. Shares are of a rate or a score."""

    changes: int = 6  # of size, in the whole job
    gain: float = 0.05  # that a larger size must promise
    near: float = 0.03  # sizes this close to the best count as equal, and the smallest is taken
    chance: float = 0.5  # with which a larger size must bring anything at all
    sure: float = 0.9  # with which a smaller size must lose nothing worth a word
    shift: float = 0.2  # of rate or of waiting, by which two windows in a row must differ: then the job is another
    patience: int = 6  # windows without a model that fits, after which other sizes are forgotten, once
    lie: float = 3.0  # times that workers' rates may differ from the samples that are done


class AutoState(msgspec.Struct):
    """Holds what the policy knows of the job. ``size``: of the last look. ``asked``: the size that the last look asked
    for; ``refused``: plans in a row that were not followed; ``wait_until``: none before, for that reason."""

    windows_of: dict[Size, list[WindowRead]] = {}
    size: Size = (0, 0)
    changes: int = 0
    asked: Size | None = None
    refused: int = 0
    wait_until: float = 0.0
    misfits: int = 0  # windows in a row at this size, in which no model fitted
    anew: bool = False  # readings of other sizes were forgotten, since no model fitted
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
    size = (seen.wanted_workers, seen.wanted_ps)
    _followed(state, size, seen)
    fuller, state.growth = memory_growth(seen, state.growth)
    if fuller is not None:
        return fuller, state
    seen = msgspec.structs.replace(seen, min_ps=max(seen.min_ps, state.growth.least_ps))
    since_s, done = seen.at - state.at, state.remaining - seen.remaining_samples
    known = state.at > 0 and state.remaining > 0 and seen.remaining_samples > 0 and since_s > 0
    first, span_s = state.at == 0, max(seen.window_s, since_s)
    state.at, state.remaining = seen.at, seen.remaining_samples
    if size != state.size:
        state.size, state.odd, state.misfits = size, 0, 0
    read = read_window(seen)
    if first or read is None or not is_steady(seen, span_s):  # (nothing denies the readings of a first look)
        return None, state
    if known and done > 0 and not 1 / settings.lie <= read.rate * since_s / done <= settings.lie:
        words = (
            f"workers tell {read.rate:,.0f} samples/s, but {done / since_s:,.0f} are done: these readings do not count"
        )
        return _say(state, "readings", words, {"told": read.rate, "done": done / since_s})
    _keep(state, size, read, settings)
    model = SpeedModel({at: size_seen(windows) for at, windows in state.windows_of.items()})
    state.misfits = 0 if model.fits else state.misfits + 1
    if state.misfits >= settings.patience and not state.anew:
        state.anew, state.misfits, state.windows_of = True, 0, {size: state.windows_of[size]}
        words = f"no model of speed fits this job: what was measured at other sizes than {words_of(size)} is forgotten"
        return _say(state, "anew", words, {"misfit": model.misfit, "sizes": len(model.seen)})
    if not model.fits:
        words = f"no model of speed fits this job: the best misses by {100 * model.misfit:.0f} %; its size stays"
        return _say(state, "misfit", words, {"misfit": model.misfit, "sizes": len(model.seen)})
    return _decide(seen, state, model, settings)


def _followed(state: AutoState, size: Size, seen: Observations) -> None:
    """Take in whether the last plan was followed: the brain drops one that has become impossible."""
    if state.asked is None:
        return
    if state.asked == size:
        state.changes, state.refused = state.changes + 1, 0
    else:
        state.refused += 1
        state.wait_until = seen.at + seen.window_s * 2 ** min(state.refused, _WAITS)
    state.asked = None


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


def is_steady(seen: Observations, span_s: float) -> bool:
    """Return whether nothing of the last ``span_s`` seconds, of which the readings are, was a change: all who are
    wanted were up and trained, nobody is on the way, and no partition was."""
    if seen.pending or len(seen.workers) != seen.wanted_workers or len(seen.servers) != seen.wanted_ps:
        return False
    since = [seen.rest_since, *(w.since for w in seen.workers), *(s.since for s in seen.servers)]
    if max(since) > seen.at - span_s or not all(s.partitions > 0 for s in seen.servers):
        return False
    return all(_trained_s(w, seen) >= _TRAINED * seen.window_s for w in seen.workers)


def _trained_s(worker: WorkerSeen, seen: Observations) -> float:
    """Return the seconds of a window that a worker's clock tells. What is outside of its loop counts only if that is a
    habit: the first windows of a process hold what it had to prepare."""
    phases = worker.short.phases
    young = worker.since > seen.at - _YOUNG * seen.window_s
    return sum(phases.values()) - (phases.get("outside", 0.0) if young else 0.0)


def _keep(state: AutoState, size: Size, read: WindowRead, settings: AutoSettings) -> None:
    """Add a window. If two in a row differ from those before at this size, the job has changed: forget the rest."""
    before = state.windows_of.get(size, [])
    typical = size_seen(before or [read])
    differs = abs(read.rate / typical.rate - 1), abs(read.data - (typical.data or 0)), abs(read.ps - (typical.ps or 0))
    state.odd = state.odd + 1 if max(differs) > settings.shift else 0
    if state.odd >= 2:
        state.odd = 0
        state.windows_of = {size: [read]}  # (the one before may be of both: the change came in the middle of it)
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
    if seen.at < state.wait_until:
        return None, state
    state.asked = chosen.size
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
    now = seen.wanted_workers, seen.wanted_ps
    workers = (now[0], now[0]) if seen.sizes == "ps" else (max(1, seen.min_workers), max(seen.max_workers, now[0]))
    if not now[1]:
        return workers, (0, 0)
    return workers, (now[1], now[1]) if seen.sizes == "workers" else (max(1, seen.min_ps), max(seen.max_ps, now[1]))


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
