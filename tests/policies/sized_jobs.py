"""Made-up jobs whose speed follows from their size, seen through a policy: for tests of ``auto``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.observation import Observations, Pace, ServerSeen, WorkerSeen
from everstep.model.plan import Plan, Scale
from everstep.policies.auto import AutoSettings, AutoState, auto

WINDOW_S = 10.0
STARTS_S = 3.0
ONE, NODE = Incarnation(1), NodeId("n")


class Demands(NamedTuple):
    """Says what a sample costs: seconds of a worker, of what all share, of a ps; ``sharp``: how much they overlap."""

    own_s: float
    shared_s: float = 0.0
    ps_s: float = 0.0
    sharp: float = 4.0

    def rate(self, workers: int, ps: int) -> float:
        """Return samples/s of the job."""
        terms = (self.own_s / workers, self.shared_s, self.ps_s / ps if ps else 0.0)
        return float(sum(t**self.sharp for t in terms) ** (-1 / self.sharp))

    def phases(self, workers: int, ps: int) -> dict[str, float]:
        """Return the phases of a worker's window. It waits for whoever is short, in proportion."""
        each_s = workers / self.rate(workers, ps)  # of a worker, for a sample
        waits_s = each_s - self.own_s
        shared, served = self.shared_s**self.sharp, (self.ps_s / ps if ps else 0.0) ** self.sharp
        data = waits_s * shared / (shared + served) if shared + served else 0.0
        own = self.own_s / each_s
        return {
            "data": WINDOW_S * data / each_s,
            "pull": WINDOW_S * (waits_s - data) / each_s,
            "forward": WINDOW_S * own * 0.4,
            "backward": WINDOW_S * own * 0.5,
            "update": WINDOW_S * own * 0.1,
        }


class Trained(NamedTuple):
    """Is what became of a job: sizes and true rates by look, the plans, the truth and the policy's state at the end,
    and each change: when it had taken effect, and the true rate then."""

    sizes: list[tuple[int, int]]
    rates: list[float]
    plans: list[Plan]
    demands: Demands
    state: AutoState
    changed: list[tuple[float, float]]

    @property
    def changes(self) -> int:
        return len(self.changed) - 1

    def reached(self, rate: float, since: float = 100.0) -> float:
        """Return the seconds from ``since`` until a size of this rate had been reached."""
        return min((max(0.0, at - since) for at, found in self.changed if found >= rate), default=float("inf"))


def look(
    at: float,
    size: tuple[int, int],
    demands: Demands,
    bounds: tuple[int, int],
    noise: float = 1.0,
    since: float = 0.0,
    optimize: str = "time",
    **more: object,
) -> Observations:
    """Return what the master sees of a window."""
    w, p = size
    samples = round(demands.rate(w, p) / w * WINDOW_S * noise)
    pace = Pace(samples=samples, per_sample_s=demands.own_s, phases=demands.phases(w, p))
    workers = tuple(
        WorkerSeen(slot=Slot(i), incarnation=ONE, node=NODE, since=since, short=pace, long=pace) for i in range(w)
    )
    servers = tuple(
        ServerSeen(slot=Slot(i), incarnation=ONE, node=NODE, since=since, partitions=1, owned=(PartitionId(i),))
        for i in range(p)
    )
    base: dict[str, object] = {
        "at": at, "window_s": WINDOW_S, "mode": "ps" if p else "allreduce", "wanted_workers": w, "wanted_ps": p,
        "workers": workers, "servers": servers, "max_workers": bounds[0], "max_ps": bounds[1], "optimize": optimize,
    }  # fmt: skip
    return Observations(**{**base, **more})  # type: ignore[arg-type]


def train(
    demands: Callable[[float], Demands],
    bounds: tuple[int, int],
    size: tuple[int, int] = (1, 1),
    seed: int = 0,
    noise: float = 0.01,
    optimize: str = "time",
    windows: int = 60,
    settings: AutoSettings = AutoSettings(),
    drops: Callable[[Plan, int], bool] = lambda plan, n: False,
    **more: object,
) -> Trained:
    """Let the policy look at a job for so many windows, as the master does: once a window, and as soon as a whole one
    lies behind a change, which takes ``STARTS_S``. It begins at 100 s. ``drops(plan, n)``: the brain does not follow
    the n-th plan."""
    rng = random.Random(seed)
    state: AutoState | None = None
    sizes, rates, plans, since = [], [], [], 0.0
    began = at = 100.0
    changed, fastest = [at], [demands(at).rate(*size)]
    while at < began + windows * WINDOW_S:
        looked, at = at, at + WINDOW_S
        if looked < since + WINDOW_S < at:
            at = since + WINDOW_S
        middle = [demands(at - WINDOW_S * share) for share in (0.9, 0.7, 0.5, 0.3, 0.1)]
        now = demands(at)
        factor = sum(each.rate(*size) for each in middle) / len(middle) / now.rate(*size)
        seen = look(at, size, now, bounds, factor * rng.gauss(1.0, noise), since, optimize, **more)
        sizes.append(size)
        rates.append(now.rate(*size))
        plan, state = auto(seen, state, settings)
        if plan is None:
            continue
        plans.append(plan)
        if drops(plan, len(plans)):
            continue
        for action in plan.actions:
            assert isinstance(action, Scale)
            size = (action.workers, action.ps or size[1])
            since = at + STARTS_S
            changed.append(since)
            fastest.append(now.rate(*size))
    assert state is not None
    return Trained(sizes, rates, plans, demands(at), state, list(zip(changed, fastest, strict=True)))


def best(demands: Demands, bounds: tuple[int, int]) -> float:
    """Return the rate of the best static size, by trying all."""
    ps = range(1, bounds[1] + 1) if bounds[1] else [0]
    return max(demands.rate(w, p) for w in range(1, bounds[0] + 1) for p in ps)
