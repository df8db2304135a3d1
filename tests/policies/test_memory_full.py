"""``memory`` helps a ps that is full although nothing grows: pushes wait for it, or it is too early for a curve."""

from __future__ import annotations

import msgspec
import pytest
from growing_jobs import look

from everstep.ids import PartitionId
from everstep.model.memory_limit import MemoryLimit
from everstep.model.plan import Scale
from everstep.policies.memory_growth import (
    MOVING,
    PEER,
    GrowthSettings,
    GrowthState,
    memory_growth,
    ps_needed,
    room_of,
)
from everstep.sizing.heaps import Reading

MB = 1e6
LIMIT = 300 * MB
SETTINGS = GrowthSettings(after=1.005)  # two ps are enough, if they were filled to the brim


def test_a_ps_that_is_full_at_the_first_look_gets_help() -> None:
    plan, state = memory_growth(look(10.0, 100, [90 * MB], 100 * MB), None)
    assert plan is not None and isinstance(plan.actions[0], Scale) and plan.actions[0].ps == 3
    assert "if the tables grow" not in plan.decision.reason
    assert len(state.readings) == 1
    plan, _ = memory_growth(look(10.0, 100, [30 * MB], 100 * MB), None)
    assert plan is None


def test_pushes_that_wait_do_not_make_a_job_look_as_if_it_had_stopped_growing() -> None:
    state: GrowthState | None = None
    for k in range(1, 6):
        _, state = memory_growth(look(10.0 * k, 100 * k, [10 * MB * k], 100 * MB, max_ps=1), state)
    assert state is not None and state.rate == pytest.approx(10.0)
    held, after = memory_growth(look(60.0, 500, [50 * MB], 60 * MB), state)
    assert held is not None and isinstance(held.actions[0], Scale)
    assert after.rate == state.rate and len(after.readings) == len(state.readings)


def test_each_ps_more_leaves_the_others_less() -> None:
    seen = look(10.0, 100, [100 * MB], LIMIT, own=80 * MB, kind=MemoryLimit.PROCESS)
    room = room_of(seen.servers[0])
    assert 0 < room < LIMIT - 80 * MB - MOVING
    count = ps_needed(seen, 1000 * MB, 0.7)
    assert 0.7 * count * (room - (count - 1) * PEER) >= 1100 * MB > 0.7 * (count - 1) * (room - (count - 2) * PEER)
    most = ps_needed(seen, 1e12, 0.7)  # no number holds these
    held = [c * (room - (c - 1) * PEER) for c in range(1, 200)]
    assert most == 1 + held.index(max(held))
    none = msgspec.structs.replace(seen.servers[0], limit_used_bytes=round(LIMIT + seen.servers[0].row_bytes))
    assert ps_needed(msgspec.structs.replace(seen, servers=(none,)), 0.0, 0.7) == 0


def test_ps_with_unlike_numbers_of_partitions_are_helped_once_nothing_moves() -> None:
    held = [tuple(map(PartitionId, range(40))), tuple(map(PartitionId, range(40, 64)))]
    seen = look(10.0, 100, [95 * MB, 94 * MB], 100 * MB, owned=held)
    state = GrowthState(partitions=(38, 26))
    state.readings, state.at = [Reading(50, 188 * MB)], 5.0
    near_end = msgspec.structs.replace(seen, remaining_samples=1)
    first, after = memory_growth(near_end, state, SETTINGS)
    assert first is None, "partitions are on their way"
    plan, _ = memory_growth(msgspec.structs.replace(near_end, at=20.0), after, SETTINGS)
    assert plan is not None and isinstance(plan.actions[0], Scale) and plan.actions[0].ps == 3


def test_a_ps_without_rows_cannot_be_helped() -> None:
    seen = look(10.0, 100, [0.0, 10 * MB], LIMIT, own=LIMIT, kind=MemoryLimit.PROCESS)
    servers = (seen.servers[0], msgspec.structs.replace(seen.servers[1], limit_used_bytes=round(100 * MB)))
    plan, _ = memory_growth(msgspec.structs.replace(seen, servers=servers), None)
    assert plan is None
