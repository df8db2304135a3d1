"""What the simulator found, kept as the shortest story that shows it."""

from __future__ import annotations

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Event,
    FinishJob,
    LeaseExpired,
    MasterStarted,
    MemberJoined,
    MemberSilent,
    NodeJoined,
    NodeLost,
    PlanRegistered,
    ProcessExited,
    ScaleAsked,
    ShardAsked,
    by_worker,
)
from everstep.brain.watch import HeartbeatWatch
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.member import Address, MemberKey, Role
from everstep.model.shard import ShardSchedule
from everstep.sim.__main__ import MIXES
from everstep.sim.group import GroupWorker

ONE = Incarnation(1)


def joined(at: float, role: Role, slot: int, node: str, incarnation: int = 1) -> MemberJoined:
    address = Address(NodeId(node), f"ps-{slot}.{incarnation}") if role is Role.PS else None
    return Event(at, MemberJoined(role, Slot(slot), Incarnation(incarnation), NodeId(node), 1, address))


def brain(spec: JobSpec, *events: Event) -> Brain:
    out = Brain()
    for event in (
        Event(0.0, MasterStarted(ONE, spec)),
        Event(1.0, NodeJoined(NodeId("node0"), "", 0, spec.ps)),
        *events,
    ):
        out.handle(event)
        out.validate()
    return out


@pytest.mark.parametrize("how", ["node lost", "silent"])
def test_a_slot_that_waits_for_a_place_does_not_keep_the_job_alive(how: str) -> None:
    """Seed 11743: scaled in, out again while it was leaving, then its node died for good; the others finish."""
    b = brain(
        JobSpec(workers=1, ps=1),
        joined(2.0, Role.PS, 0, "node0"),
        joined(2.0, Role.WORKER, 0, "node0"),
        Event(3.0, NodeJoined(NodeId("node1"), "", 1, 0)),
        joined(4.0, Role.WORKER, 1, "node1"),
        Event(
            5.0, PlanRegistered(ShardSchedule(name="t", samples=5, shard_samples=5, seed=0)), by_worker(Slot(0), ONE)
        ),
        Event(5.0, ShardAsked(0, 1, 1), by_worker(Slot(0), ONE)),
        Event(6.0, ScaleAsked(Role.WORKER, 1)),
        Event(7.0, ScaleAsked(Role.WORKER, 2)),
        Event(8.0, ProcessExited(Role.WORKER, Slot(0), ONE, 0)),
    )
    out = b.handle(Event(9.0, NodeLost(NodeId("node1"), "gone")))
    if how == "silent":
        out += b.handle(Event(9.0, MemberSilent(Role.WORKER, Slot(1), ONE, 3.0, True)))
    assert [i.exit_code for i in out if isinstance(i, FinishJob)] == [0]


def test_the_map_waits_for_every_ps_that_comes_back() -> None:
    """Seed 537: two ps came back at once; the first one's hello published a map without the other."""
    b = brain(JobSpec(workers=1, ps=2), joined(2.0, Role.PS, 0, "node0"), joined(2.0, Role.PS, 1, "node0"))
    running = tuple((Role.PS, Slot(s), Incarnation(2), 1) for s in range(2))
    b.handle(Event(3.0, NodeJoined(NodeId("node0"), "", 0, 2, running)))
    for slot in range(2):
        b.handle(joined(4.0, Role.PS, slot, "node0", 2))
        b.validate()
    assert b.placement is not None
    assert [(p.slot, p.incarnation) for p in b.placement.servers] == [(0, 2), (1, 2)]


def test_a_master_that_was_stopped_before_its_first_tick_declares_nobody_lost() -> None:
    """Seed 2668: no tick had come before, so the pause was not seen, and the silence was theirs."""
    watch = HeartbeatWatch(JobSpec(suspect_after_s=1.0, lost_after_s=2.0))
    watch.heard(MemberKey(Role.PS, Slot(0)), ONE, 10.0)
    assert watch.tick(15.0) == []
    assert watch.tick(15.25) == []


def test_leases_held_ahead_do_not_expire_while_their_worker_gets_on() -> None:
    """Seed 23713: with a short ``lease_s``, leases that were held ahead ran out before their turn came."""
    watch = HeartbeatWatch(JobSpec(lease_s=2.0))
    key = MemberKey(Role.WORKER, Slot(0))
    for no in (1, 2, 3):
        watch.granted(LeaseNo(no), ShardKey(no), 0, 0.0)
    expired = []
    for step in range(1, 12):
        at = step * 0.5
        watch.heard(key, ONE, at, ((LeaseNo(1), step), (LeaseNo(2), 0)))  # it does not know of lease 3
        expired += [e.lease for e in watch.tick(at) if isinstance(e, LeaseExpired)]
    assert set(expired) == {3}
    for step in range(12, 20):  # alive, but it gets nowhere
        watch.heard(key, ONE, step * 0.5, ((LeaseNo(1), 11), (LeaseNo(2), 0)))
        expired += [e.lease for e in watch.tick(step * 0.5) if isinstance(e, LeaseExpired)]
    assert set(expired) == {1, 2, 3}


@pytest.mark.parametrize(
    ("mix", "seed", "reports_agreed"),
    [
        ("group", 5236, False),
        ("group", 17108, None),
        ("hybrid", 463, False),
        ("hybrid", 13853, False),
        ("hybrid", 271, True),
        ("hybrid", 794, True),
        ("hybrid", 1617, True),
        ("hybrid", 10265, None),
        ("hybrid", 16311, None),
        ("machines", 860, None),
        ("machines", 864, None),
        ("machines", 970, None),
        ("paced", 9614, None),
        ("lag", 10238, None),
        ("machines", 5682, None),
        ("machines", 7983, None),
        ("paced", 6140, None),
        ("ps", 5652, None),
        ("ps", 10102, None),
        ("ps", 16445, None),
        ("ps", 20991, None),
        ("suspend", 1650, None),
        ("suspend", 4156, None),
        ("suspend", 11416, None),
        ("suspend", 17731, None),
    ],
)
def test_a_seed_that_found_a_defect(
    mix: str, seed: int, reports_agreed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a story of its own elsewhere: ``group_end_of_a_lost_line``, ``group_leaver_cut_off``,
    ``group_leaver_behind``, ``chief_asked_late`` (transcripts), in ``tests/protect/test_machine.py``,
    ``tests/brain/test_conclusions.py`` and ``tests/allreduce/test_session.py``. Of eight the simulator was wrong: 860,
    an owner that died in the last moment had not taken its partition over yet; 10265, who connects for a new group
    waits anew; 4156, a ps that was paused until behind the end tells its mirrors then; 5652 and 10102, a ps that dies
    with the last step has not told its mirrors which shards were released; 1650, a job that ends before its ps are back
    has its rows in the checkpoint; 7983 and 16445, a new owner that asks a ps which died unnoticed when
    the job ended has the partition in a mirror."""
    monkeypatch.setattr(GroupWorker, "reports_agreed", reports_agreed)
    scenario_of, _, run = MIXES[mix]
    run(seed, scenario_of(seed))
