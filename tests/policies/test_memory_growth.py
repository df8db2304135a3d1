"""``memory`` adds ps before one is full, moves partitions where there is room, and says why where there is none."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import msgspec
import pytest
from growing_jobs import NODE, PARTITIONS, grow, look
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.load import load_spec
from everstep.errors import ConfigError
from everstep.ids import NodeId, PartitionId, Slot
from everstep.model.memory_limit import MemoryLimit
from everstep.model.plan import MovePartitions, Scale
from everstep.policies.auto import AutoState, auto
from everstep.policies.memory_growth import KEPT, MOVING, GrowthState, forecasts, memory_growth, ps_needed, room_of
from everstep.policies.stragglers.policy import SHIPPED
from everstep.sizing.heaps import GrowthCurve, Reading

MB = 1e6
RECORDED = Path(__file__).with_name("flights_growth.csv")


@pytest.mark.parametrize("exponent", [0.4, 0.7, 1.0])
@pytest.mark.parametrize("own", [0.0, 100 * MB])
def test_tables_that_grow_to_four_times_a_limit_never_reach_it(exponent: float, own: float) -> None:
    seconds = 1200
    end = 400 * MB
    done = grow(lambda s: end * (s / seconds) ** exponent, 100 * MB + (1.05 * own + MOVING if own else 0), seconds, own)
    assert done.worst < 1.0 and done.ps >= 5
    assert len(done.plans) <= 6, "not one ps at a time"
    assert done.ps <= 14


def test_a_job_that_fits_is_left_alone() -> None:
    done = grow(lambda s: 60 * MB * (1 - math.exp(-s / 200)), 100 * MB, 1200)
    assert (done.ps, done.plans, done.said) == (1, [], [])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    exponent=st.floats(0.2, 1.0), times=st.floats(1.0, 8.0), seconds=st.integers(600, 2000), start=st.floats(0.0, 0.3)
)
def test_no_job_with_room_to_grow_dies(exponent: float, times: float, seconds: int, start: float) -> None:
    limit = 100 * MB
    done = grow(lambda s: limit * (start + times * (s / seconds) ** exponent), limit, seconds)
    # What is there at the first looks grows faster than later: such jobs may have a ps that is full before any look.
    first = start + times * (33.0 / seconds) ** exponent
    assert done.worst < 1.0 or first > 0.5, done


def test_without_room_it_says_once_what_helps() -> None:
    done = grow(lambda s: 0.5 * MB * s, 100 * MB, 400, max_ps=2)
    assert done.ps == 2 and len(done.said) == 2
    assert "there may be no more than 2 ps: raise --max-ps" in done.said[1]

    def said(**more: object) -> str:
        state = GrowthState(readings=[Reading(k, k * 9 * MB) for k in range(1, 10)], at=90.0, first_ps=1)
        plan, _ = memory_growth(look(100.0, 10, [90 * MB], 100 * MB, **more), state)  # type: ignore[arg-type]
        assert plan is not None
        return "" if plan.actions else plan.decision.reason

    assert said() == ""
    assert "no node would take another ps: add a node, or raise the limit" in said(ps_places=())
    assert "another ps on n would share that limit" in said(kind=MemoryLimit.CONTAINER)
    assert said(kind=MemoryLimit.CONTAINER, ps_places=(NODE, NodeId("m"))) == ""
    assert "above --max-memory: raise it" in said(max_memory_bytes=1)


def test_partitions_move_where_another_ps_has_room() -> None:
    held = [tuple(map(PartitionId, range(48))), tuple(map(PartitionId, range(48, 64)))]
    state = GrowthState(readings=[Reading(k, 96 * MB + k * MB) for k in range(1, 10)], at=90.0, first_ps=2)
    seen = look(100.0, 10, [90 * MB, 15 * MB], 100 * MB, owned=held)
    plan, _ = memory_growth(seen, state)
    assert plan is not None and len(plan.actions) == 1
    (action,) = plan.actions
    assert isinstance(action, MovePartitions)
    assert set(action.owners.values()) == {Slot(1)} and set(action.owners) <= set(held[0])
    closed = tuple(msgspec.structs.replace(s, closed=held[0]) for s in seen.servers)
    plan, _ = memory_growth(msgspec.structs.replace(seen, servers=closed), state)
    assert plan is None or not any(isinstance(a, MovePartitions) for a in plan.actions), "they must not be there"


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.floats(0, 200 * MB), min_size=1, max_size=6),
    limit=st.floats(10 * MB, 300 * MB),
    own=st.floats(0, 50 * MB),
    slope=st.floats(0, 20 * MB),
)
def test_no_plan_makes_another_ps_full(sizes: list[float], limit: float, own: float, slope: float) -> None:
    total = sum(sizes)
    state = GrowthState(readings=[Reading(k, max(1.0, total - (10 - k) * slope)) for k in range(1, 10)], at=90.0)
    seen = look(100.0, 10, sizes, limit, own=own)
    plan, after = memory_growth(seen, state)
    assert len(state.readings) == 9, "a policy does not change the state that it was given"
    assert after.least_ps <= len(sizes)
    if plan is None or not plan.actions:
        return
    (action,) = plan.actions
    if isinstance(action, Scale):
        assert len(sizes) < action.ps <= PARTITIONS
        return
    assert isinstance(action, MovePartitions)
    each = {s.slot: s.row_bytes / s.partitions for s in seen.servers}
    sources = {b: s.slot for s in seen.servers for b in s.owned}
    used = {f.server.slot: f.used for f in forecasts(seen, 0.0)}
    for partition, slot in action.owners.items():
        assert sources[partition] != slot
        used[slot] += each[sources[partition]]
    for server in seen.servers:
        if server.slot in action.owners.values():
            assert used[server.slot] <= room_of(server)


def test_readings_that_lie_and_ps_that_are_lost_begin_a_new_curve() -> None:
    state: GrowthState | None = None
    for k in range(1, 5):
        _, state = memory_growth(look(10.0 * k, 100 * k, [k * MB], 100 * MB), state)
    assert state is not None and len(state.readings) == 4
    for back in (look(50.0, 5, [5 * MB], 100 * MB), look(50.0, 500, [MB], 100 * MB)):
        plan, anew = memory_growth(back, state)
        assert plan is None and len(anew.readings) == 1
    plan, same = memory_growth(look(50.0, 500, [0.0], 100 * MB), state)
    assert plan is None and len(same.readings) == 4
    assert ps_needed(look(0.0, 1, [MB], 10 * MB, own=20 * MB, kind=MemoryLimit.CONTAINER), 0.0, 0.7) == 0, (
        "it leaves nothing for rows"
    )
    for k in range(5, 300):
        _, state = memory_growth(look(10.0 * k, 100 * k, [k * 1e4], 1e12), state)
    assert len(state.readings) <= KEPT


def test_auto_asks_for_what_memory_asks_for() -> None:
    state = GrowthState(readings=[Reading(k, k * 9 * MB) for k in range(1, 10)], at=90.0, first_ps=1)
    seen = look(100.0, 10, [90 * MB], 100 * MB)
    alone, _ = memory_growth(seen, state)
    plan, after = auto(seen, AutoState(growth=state))
    assert plan == alone and plan is not None and after.changes == 0, "it is no change that is counted"
    assert SHIPPED["memory"] is memory_growth


def test_a_job_without_ps_has_no_use_for_it() -> None:
    with pytest.raises(ConfigError, match=r"^policy = 'memory' .*: adds ps before one is full, and this job has none"):
        load_spec(None, {"policy": "memory", "mode": "allreduce"}, {})
    assert load_spec(None, {"policy": "memory+shared"}, {})[0].policy == "memory+shared"


def test_recorded_tables_of_flights_are_predicted() -> None:
    """Rows of a real job (``examples/01_flights_dlrm.py``) over its first epoch: the half predicts the whole."""
    with RECORDED.open() as file:
        found = [Reading(int(line["samples"]), float(line["row_bytes"])) for line in csv.DictReader(file)]
    assert len(found) > 10
    for share in (0.3, 0.5, 0.7):
        known = found[: round(share * len(found))]
        predicted = GrowthCurve(known).after(found[-1].samples - known[-1].samples)
        assert known[-1].bytes + predicted.high >= 0.98 * found[-1].bytes, "not above its upper end"
        assert known[-1].bytes + predicted.likely <= 1.5 * found[-1].bytes
