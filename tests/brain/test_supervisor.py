"""The supervisor, driven by members and machines that come and go at random: it waits no longer than it may, does
nothing twice, and suspends only what is safe."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.brain.brain import Brain
from everstep.brain.events import (
    MASTER,
    RULES,
    CheckpointCommitted,
    CommitManifest,
    Event,
    FactType,
    FinishJob,
    InstructionType,
    JobUnsuspended,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    NodeLost,
    Note,
    Ok,
    OrderSnapshots,
    ProcessExited,
    Refused,
    Reply,
    ScaleAsked,
    Sender,
    SnapshotsWritten,
    StartProcess,
    StopProcess,
    SupervisionDue,
    SuspendAsked,
    by_ps,
)
from everstep.brain.job import Phase
from everstep.brain.states import StateCheck
from everstep.brain.supervision import JobStage
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId
from everstep.model.member import Address, Role
from everstep.model.snapshot import PartitionSnapshot

TICK_S = 0.5
NODES = ("node0", "node1", "node2")


class Cluster:
    """A brain, a clock that ticks, and processes that say hello as soon as they are started."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self.brain, self.at, self.check = spec, Brain(), 1000.0, StateCheck()
        self.masters = 0
        self.out: list[InstructionType] = []
        self.lack_s = 0.0  # since members became too few, while they were
        self.new_master()

    def new_master(self) -> None:
        self.masters += 1
        self.tell(MasterStarted(Incarnation(self.masters), self.spec, True))
        self.tell(NodeJoined(NodeId("node0"), "", 1, 0))

    def tell(self, fact: FactType, sender: Sender = MASTER) -> list[InstructionType]:
        out = self.brain.handle(Event(self.at, fact, sender))
        self.brain.validate()
        self.check.look(self.brain, fact)
        self.out += out
        for i in out:
            if isinstance(i, StartProcess):
                address = Address(i.node, f"ps-{i.slot}") if i.role is Role.PS else None
                self.tell(MemberJoined(i.role, i.slot, i.incarnation, i.node, 7, address))
            elif isinstance(i, StopProcess):
                self.tell(ProcessExited(i.role, i.slot, i.incarnation, 143))
            elif isinstance(i, OrderSnapshots):
                self.write_snapshots(i.checkpoint)
            elif isinstance(i, CommitManifest):
                self.tell(CheckpointCommitted(i.manifest.checkpoint))
        return out

    def write_snapshots(self, checkpoint: int) -> None:
        placement = self.brain.placement
        assert placement is not None
        for place in placement.servers:
            owned = placement.owned_by(place.slot)
            snapshots = tuple(
                PartitionSnapshot(partition=b, seq=1, fingerprint=0, watermarks=(), files=(), bytes_written=100)
                for b in owned
            )
            fact = SnapshotsWritten(checkpoint, snapshots)
            self.tell(fact, by_ps(place.slot, place.incarnation))

    def run(self, seconds: float) -> None:
        end = self.at + seconds
        while self.at < end and not self.brain.job.over:
            self.at += TICK_S
            supervision = self.brain.state.supervision
            if 0 < supervision.due_at <= self.at:
                self.tell(SupervisionDue())
            self.lack_s = self.lack_s + TICK_S if supervision.lack else 0.0


def cluster(**given: object) -> Cluster:
    fields: dict[str, object] = {"workers": 1, "ps": 1, "partitions": 4, "max_wait": "20s", "stabilization": "5s"}
    return Cluster(JobSpec(**{**fields, **given}))  # type: ignore[arg-type]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from(NODES[1:])),
        st.tuples(st.just("lose"), st.sampled_from(NODES[1:])),
        st.tuples(st.just("kill"), st.integers(0, 3)),
        st.tuples(st.just("run"), st.sampled_from([0.5, 1.0, 4.0, 30.0])),
        st.tuples(st.just("suspend"), st.just(0)),
        st.tuples(st.just("scale"), st.integers(1, 3)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(
    STEPS,
    st.sampled_from(["suspend", "fail", "run"]),
    st.sampled_from(["run_with_available", "wait_for_all"]),
    st.sampled_from([1, 2]),
)
def test_it_waits_no_longer_than_it_may(steps: list[tuple[str, object]], then: str, recovery: str, least: int) -> None:
    c = cluster(on_wait_timeout=then, recovery=recovery, min_workers=least)
    for step, what in steps:
        brain = c.brain
        if brain.job.over:
            break
        match step:
            case "join":
                c.tell(NodeJoined(NodeId(str(what)), "", 1, 0))
            case "lose":
                c.tell(NodeLost(NodeId(str(what)), "it is gone"))
            case "kill":
                records = [s for s in brain.members.workers.values() if s.running]
                if records:
                    m = records[int(str(what)) % len(records)].member
                    c.tell(ProcessExited(m.role, m.slot, m.incarnation, -9))
            case "run":
                c.run(float(str(what)))
            case "suspend":
                c.tell(SuspendAsked("asked"))
            case "scale":
                c.tell(ScaleAsked(Role.WORKER, int(str(what))))
        supervision = brain.state.supervision
        if supervision.lack and not brain.job.over and then != "run":
            assert c.lack_s <= 20.0 + TICK_S, f"{supervision.lack} for {c.lack_s} s, and nothing was done"
        if supervision.stage is JobStage.FAILED:
            assert brain.job.exit_code == 4
        assert supervision.stage is not JobStage.SUSPENDED or brain.job.phase is Phase.SUSPENDED
    restored = Brain.restore(c.brain.snapshot())
    assert restored.snapshot() == c.brain.snapshot()


def test_capacity_that_flaps_every_second_costs_no_more_than_it_must() -> None:
    """A node that comes and goes every second does not wind the clock back, and is told of once each time."""
    c = cluster(min_workers=2, max_wait="20s")
    for _ in range(60):
        c.tell(NodeJoined(NodeId("node1"), "", 1, 0))
        c.run(1.0)
        c.tell(NodeLost(NodeId("node1"), "it is gone"))
        c.run(1.0)
        if c.brain.job.over:
            break
    assert c.brain.job.phase is Phase.SUSPENDED, "2 workers were never there for 5 s"
    assert c.at - 1000.0 <= 25.0
    assert len(c.out) < 250
    assert len(c.brain.state.supervision.changes) <= 64


def test_steady_capacity_ends_the_wait() -> None:
    c = cluster(min_workers=2, max_wait="20s")
    c.run(15.0)
    c.tell(NodeJoined(NodeId("node1"), "", 1, 0))
    c.run(10.0)
    c.tell(NodeLost(NodeId("node1"), "it is gone"))
    c.run(15.0)
    assert not c.brain.job.over and c.brain.state.supervision.stage is JobStage.WAITING
    c.run(10.0)
    assert c.brain.job.phase is Phase.SUSPENDED


def test_a_suspended_job_goes_on_once() -> None:
    c = cluster()
    c.tell(SuspendAsked("asked"))
    assert c.brain.job.over and c.brain.job.exit_code == 0
    assert any(isinstance(i, FinishJob) for i in c.out)
    c.tell(JobUnsuspended(7, "another one"))
    assert c.brain.job.over
    c.tell(JobUnsuspended(1, "go on"))
    c.new_master()
    assert not c.brain.job.over and c.brain.state.supervision.stage is JobStage.RUNNING
    assert c.brain.job.failures.master == 0, "no master was lost"
    assert all(s.member.incarnation == 2 for s in c.brain.members.all())
    c.tell(JobUnsuspended(1, "go on"))
    assert not [i for i in c.out[-1:] if isinstance(i, Note) and i.decision.action == "unsuspend"]


def test_a_request_to_suspend_that_comes_late_changes_nothing() -> None:
    """The operator's request may be on its way while the job is suspended and goes on."""
    c = cluster()
    late = SuspendAsked("spec.suspend", suspensions=0)
    c.tell(late)
    c.tell(JobUnsuspended(1, "go on"))
    c.new_master()
    before = c.brain.snapshot()
    assert c.tell(late) == [Reply(Ok())]
    assert not c.brain.job.over and c.brain.snapshot() == before
    c.tell(SuspendAsked("spec.suspend", suspensions=1))
    assert c.brain.job.phase is Phase.SUSPENDED


def waited_s(c: Cluster) -> float:
    """Let a new master wait until the job is suspended; return how long that took."""
    c.masters += 1
    began = c.at
    c.tell(MasterStarted(Incarnation(c.masters), c.spec, **RULES))
    c.tell(NodeJoined(NodeId("node0"), "", 1, 0))
    c.run(2000.0)
    assert c.brain.job.phase is Phase.SUSPENDED
    return c.at - began


def test_waits_in_vain_become_longer_until_the_job_has_trained() -> None:
    """Agents that need longer than ``max_wait`` to start would never be there, else."""
    c = cluster(min_workers=2, max_wait="20s")
    c.run(30.0)
    waits = []
    for suspensions in range(1, 8):
        c.tell(JobUnsuspended(suspensions, "there is room"))
        waits.append(waited_s(c))
    assert waits == pytest.approx([40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0], abs=2 * TICK_S)
    assert "max_wait=20s, 600 s as the last waits were in vain" in c.brain.state.supervision.why

    c.tell(JobUnsuspended(8, "there is room"))
    c.masters += 1
    c.tell(MasterStarted(Incarnation(c.masters), c.spec, **RULES))
    for node in NODES[:2]:
        c.tell(NodeJoined(NodeId(node), "", 1, 0))
    c.run(20.0)
    assert c.brain.state.supervision.stage is JobStage.RUNNING
    c.tell(SuspendAsked("asked"))
    c.tell(JobUnsuspended(9, "go on"))
    assert waited_s(c) == pytest.approx(20.0, abs=2 * TICK_S)


@pytest.mark.parametrize(
    ("given", "role", "count", "error"),
    [
        ({"max_workers": 2}, Role.WORKER, 3, "3 workers: more than max_workers=2"),
        ({"max_ps": 2}, Role.PS, 3, "3 ps: more than max_ps=2"),
        ({"min_ps": 2, "ps": 2}, Role.PS, 1, "1 ps: fewer than min_ps=2"),
    ],
)
def test_bounds_of_a_scale(given: dict[str, int], role: Role, count: int, error: str) -> None:
    c = cluster(**given)
    (reply,) = c.tell(ScaleAsked(role, count))
    assert reply == Reply(Refused(error))


def test_nodes_bring_no_more_workers_than_there_may_be() -> None:
    c = cluster(max_workers=2)
    c.tell(NodeJoined(NodeId("node1"), "", 4, 0))
    assert c.brain.job.workers_wanted == 2 and len(c.brain.members.workers) == 2
