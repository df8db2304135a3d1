"""A job whose tables grow, under virtual time, seen through policy ``memory``: for its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from everstep.brain.policy_control import refuse
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.memory_limit import MemoryLimit
from everstep.model.observation import Observations, ServerSeen
from everstep.model.plan import MovePartitions, Plan, Resize, Scale
from everstep.model.process_size import ProcessSize
from everstep.policies.memory_growth import GrowthState, memory_growth

WINDOW_S, NODE, ONE = 10.0, NodeId("n"), Incarnation(1)
PARTITIONS = 64
START_S, MOVE_S = 5.0, 8.0  # a ps more: until it is up, and until partitions have moved


class Grown(NamedTuple):
    """Says how a job went: the fullest ps at any second over its limit, ps at the end, the plans, what was said, and
    the limit of each ps at the end."""

    worst: float
    ps: int
    plans: list[Plan]
    said: list[str]
    limit: float


def look(
    at: float,
    samples: int,
    sizes: list[float],
    limit: float,
    wanted: int | None = None,
    own: float = 0.0,
    kind: MemoryLimit = MemoryLimit.STORE,
    owned: list[tuple[PartitionId, ...]] | None = None,
    **more: object,
) -> Observations:
    """Return what a policy sees of ps that have so many bytes of rows each. ``own``: what else counts."""
    held = owned or [tuple(PartitionId(b) for b in range(i, PARTITIONS, len(sizes))) for i in range(len(sizes))]
    servers = tuple(
        ServerSeen(
            slot=Slot(i), incarnation=ONE, node=NODE, partitions=len(held[i]), owned=held[i], row_bytes=round(size),
            rows=round(size / 400), limit_kind=kind, limit_bytes=round(limit), limit_used_bytes=round(size + own),
        )
        for i, size in enumerate(sizes)
    )  # fmt: skip
    base: dict[str, object] = {
        "at": at, "window_s": WINDOW_S, "wanted_workers": 1, "wanted_ps": wanted or len(sizes), "servers": servers,
        "ps_places": (NODE,), "max_ps": PARTITIONS, "samples_done": samples,
    }  # fmt: skip
    return Observations(**{**base, **more})  # type: ignore[arg-type]


def grow(
    size_at: Callable[[float], float],
    limit: float,
    seconds: int,
    own: float = 0.0,
    max_ps: int = PARTITIONS,
    ps: int = 1,
    **bounds: object,
) -> Grown:
    """Train for so many seconds, 100 samples each. ``size_at``: bytes of all tables at a second."""
    state: GrowthState | None = None
    coming, ready, asked = 0, 0.0, 0
    worst, plans, said = 0.0, [], []
    for second in range(1, seconds):
        if coming and second >= ready:
            ps, coming = coming, 0
        worst = max(worst, (size_at(second) / ps + own) / limit)
        if second % WINDOW_S:
            continue
        up = bool(coming) and second < ready - MOVE_S
        more: dict[str, object] = {"max_ps": max_ps, "pending": int(up), "remaining_samples": 100 * (seconds - second)}
        more |= {"ps_size": ProcessSize(0, asked), **bounds}
        kind = MemoryLimit.PROCESS if own else MemoryLimit.STORE
        seen = look(float(second), 100 * second, [size_at(second) / ps] * ps, limit, None, own, kind, **more)
        if coming:
            continue  # (the brain drops plans while partitions are under way)
        plan, state = memory_growth(seen, state)
        if plan is None:
            continue
        assert refuse(plan, seen) == ""
        said.append(str(plan.decision))
        for action in plan.actions:
            assert isinstance(action, Scale | MovePartitions | Resize)
            if isinstance(action, Resize):
                assert action.running and action.memory_bytes > limit
                plans.append(plan)
                limit = asked = action.memory_bytes
            if isinstance(action, Scale):
                plans.append(plan)
                coming, ready = action.ps, second + START_S + MOVE_S
    return Grown(worst, ps, plans, said, limit)
