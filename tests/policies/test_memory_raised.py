"""``memory`` and ``auto`` give each ps more memory before it is full, where there can be no more ps."""

from __future__ import annotations

import msgspec
import pytest
from growing_jobs import NODE, grow, look
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.brain.policy_control import refuse
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.member import Role
from everstep.model.memory_limit import MemoryLimit
from everstep.model.observation import Observations, WorkerSeen
from everstep.model.plan import MovePartitions, Plan, Resize
from everstep.model.process_size import ProcessSize
from everstep.policies.auto import AutoState, auto
from everstep.policies.memory_growth import MOVING, GrowthState, memory_growth
from everstep.sizing.heaps import Reading

MB = 1e6
LIMIT, OWN = 400 * MB, 100 * MB


def grown(limit: float = LIMIT, **more: object) -> tuple[Observations, GrowthState]:
    """Return two ps that are equally full, soon to their limit, in a job that may have no third one."""
    state = GrowthState(readings=[Reading(k, k * 40 * MB) for k in range(1, 10)], at=90.0, first_ps=2)
    base: dict[str, object] = {"own": OWN, "kind": MemoryLimit.PROCESS, "max_ps": 2, "max_memory_bytes": 10**10}
    return look(100.0, 10, [200 * MB, 200 * MB], limit, **{**base, **more}), state  # type: ignore[arg-type]


def resized(plan: Plan | None, seen: Observations) -> int:
    """Return what each ps gets by a plan that does nothing else."""
    assert plan is not None
    (action,) = plan.actions
    assert isinstance(action, Resize) and (action.role, action.threads, action.running) == (Role.PS, 0, True)
    assert refuse(plan, seen) == ""
    return action.memory_bytes


def test_ps_that_are_equally_full_get_more_memory_at_once_and_the_journal_says_why() -> None:
    seen, state = grown()
    plan, after = memory_growth(seen, state)
    given = resized(plan, seen)
    assert given >= 1.25 * LIMIT and after.asked_bytes == given
    assert plan is not None and plan.decision.action == "resize"
    assert "there may be no more than 2 ps, so each ps gets " in plan.decision.reason
    assert "instead of 381.5 MiB, those that run at once" in plan.decision.reason
    assert plan.decision.inputs["memory_bytes"] == given
    assert plan.decision.rejected[0] == "there may be no more than 2 ps: raise --max-ps"
    by_auto, kept = auto(seen, AutoState(growth=state))
    assert by_auto == plan and kept.changes == 0, "it is no change that is counted"


def test_what_is_given_holds_the_tables_for_a_while() -> None:
    seen, state = grown()
    plan, after = memory_growth(seen, state)
    more = resized(plan, seen)
    raised = grown(ps_size=ProcessSize(0, more))[0]
    servers = tuple(msgspec.structs.replace(s, limit_bytes=more) for s in raised.servers)
    again, _ = memory_growth(msgspec.structs.replace(raised, at=110.0, samples_done=11, servers=servers), after)
    assert again is None


@pytest.mark.parametrize("ps", [1, 2, 4])
@pytest.mark.parametrize("exponent", [0.4, 0.7, 1.0])
def test_tables_that_grow_to_four_times_a_limit_never_reach_it_with_the_ps_that_there_are(
    exponent: float, ps: int
) -> None:
    seconds, limit = 1200, 100 * MB + 1.05 * OWN + MOVING
    bound = {"max_memory_bytes": 20_000 * MB}
    done = grow(lambda s: 400 * MB * ps * (s / seconds) ** exponent, limit, seconds, OWN, ps, ps, **bound)
    assert done.worst < 1.0 and done.ps == ps
    assert len(done.plans) <= 8 and done.limit > 2 * limit


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    most=st.integers(100, 5000),
    node=st.integers(0, 5000),
    worker=st.integers(0, 3000),
    size=st.integers(0, 1000),
    workers=st.integers(1, 4),
)
def test_bounds_hold(most: int, node: int, worker: int, size: int, workers: int) -> None:
    one = WorkerSeen(slot=Slot(0), incarnation=Incarnation(1), node=NODE, rss_bytes=worker * 10**6)
    bounds = {"max_memory_bytes": most * 10**6, "ps_memory_most": node * 10**6}
    seen, state = grown(wanted_workers=workers, workers=(one,), worker_size=ProcessSize(0, size * 10**6), **bounds)
    plan, _ = memory_growth(seen, state)
    assert plan is not None
    if not plan.actions:
        assert "--max-memory leaves each ps" in plan.decision.reason or "ulimit -Hd" in plan.decision.reason
        return
    more = resized(plan, seen)
    assert more >= 1.1 * LIMIT and 2 * more + workers * max(worker, size) * 10**6 <= most * 10**6
    assert not node or more <= node * 10**6


def test_without_a_bound_it_goes_as_far_as_a_death_would() -> None:
    seen, state = grown(max_memory_bytes=0)
    plan, state = memory_growth(seen, state)
    assert resized(plan, seen) <= 2 * LIMIT
    state.asked_bytes = 0
    most = round(2 * LIMIT)
    servers = tuple(
        msgspec.structs.replace(s, limit_bytes=most, row_bytes=round(600 * MB), limit_used_bytes=round(700 * MB))
        for s in seen.servers
    )
    later = msgspec.structs.replace(seen, at=200.0, samples_done=30, servers=servers)
    plan, _ = memory_growth(later, state)
    assert plan is not None and not plan.actions
    assert "each ps has got 2 times what it had: give --max-memory, or everstep resize" in plan.decision.reason


def test_limits_that_are_not_of_a_process_are_not_raised() -> None:
    for kind, own in ((MemoryLimit.STORE, 0.0), (MemoryLimit.CONTAINER, OWN)):
        seen, state = grown(limit=220 * MB + own, kind=kind, own=own)
        plan, _ = memory_growth(seen, state)
        assert plan is not None and not plan.actions
        assert plan.decision.reason.endswith("there may be no more than 2 ps: raise --max-ps")


def test_a_limit_that_stays_is_said_once_and_asked_for_no_more() -> None:
    seen, state = grown()
    plan, state = memory_growth(seen, state)
    more = ProcessSize(0, resized(plan, seen))
    soon = msgspec.structs.replace(seen, at=103.0, ps_size=more)
    plan, state = memory_growth(soon, state)
    assert plan is None, "what the ps tell may be of before"
    late = msgspec.structs.replace(soon, at=110.0)
    plan, state = memory_growth(late, state)
    assert plan is not None and not plan.actions and "ps:0 still has 381.5 MiB although" in plan.decision.reason
    assert memory_growth(msgspec.structs.replace(late, at=120.0), state)[0] is None
    dropped, _ = memory_growth(msgspec.structs.replace(late, ps_size=ProcessSize()), state)
    assert resized(dropped, late), "nobody followed it: it is asked for again"


def test_partitions_move_first_where_that_helps() -> None:
    held = [tuple(map(PartitionId, range(56))), tuple(map(PartitionId, range(56, 64)))]
    state = GrowthState(readings=[Reading(k, (200 + k) * MB) for k in range(1, 10)], at=90.0, first_ps=2)
    seen = look(
        100.0, 10, [190 * MB, 25 * MB], LIMIT - 50 * MB, own=OWN, kind=MemoryLimit.PROCESS, owned=held, max_ps=2
    )
    plan, _ = memory_growth(seen, state)
    assert plan is not None and isinstance(plan.actions[0], MovePartitions)
