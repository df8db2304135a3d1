"""Silence in virtual seconds."""

from __future__ import annotations

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Event,
    LeaseExpired,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    NodeHeard,
    NodeJoined,
    NodeLost,
    PlanRegistered,
    ShardAsked,
    by_worker,
)
from everstep.brain.watch import TICK_S, HeartbeatWatch, WatchEvent
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.member import Address, MemberKey, Role
from everstep.model.shard import ShardSchedule

SPEC = JobSpec(workers=2, ps=1, suspect_after_s=3.0, lost_after_s=8.0, lease_s=20.0)
NODE = NodeId("node0")
ONE = Incarnation(1)
W0, W1, PS = MemberKey(Role.WORKER, Slot(0)), MemberKey(Role.WORKER, Slot(1)), MemberKey(Role.PS, Slot(0))


def started() -> Brain:
    brain = Brain()
    brain.handle(Event(0.0, MasterStarted(ONE, SPEC)))
    brain.handle(Event(0.0, NodeJoined(NODE, "", 0, 0)))
    brain.handle(Event(0.0, MemberJoined(Role.PS, Slot(0), ONE, NODE, 1, Address(NODE, "x"))))
    for slot in (Slot(0), Slot(1)):
        brain.handle(Event(0.0, MemberJoined(Role.WORKER, slot, ONE, NODE, 1)))
    brain.handle(
        Event(
            0.0, PlanRegistered(ShardSchedule(name="d", samples=100, shard_samples=10, seed=0)), by_worker(Slot(0), ONE)
        )
    )
    return brain


class Time:
    """Runs brain and watch; those named in ``beating`` send a heartbeat every second."""

    def __init__(self, brain: Brain) -> None:
        self.brain, self.watch, self.at = brain, HeartbeatWatch(SPEC), 0.0
        self.beating: set[MemberKey] = {W0, W1, PS}
        self.agent_beats = True
        self.progress: dict[int, int] = {}
        self.idle: dict[MemberKey, float] = {}  # seconds that its heartbeats tell; others do something all the time
        self.inside = True
        self.vouched: set[MemberKey] = set()  # the agent says that these run
        self.cpu_s = 0.0
        self.seen: list[WatchEvent] = []
        self.watch.look(brain, 0.0)

    def run(self, seconds: float) -> list[WatchEvent]:
        seen: list[WatchEvent] = []
        for _ in range(round(seconds / TICK_S)):
            self.at += TICK_S
            if self.at % 1.0 == 0.0:
                for key in self.beating:
                    progress = tuple((no, position) for no, position in self.progress.items())
                    for event in self.watch.heard(key, ONE, self.at, progress):  # type: ignore[arg-type]
                        self.brain.handle(Event(self.at, event))
                        seen.append(event)
                    self.watch.moved(key, ONE, self.at, self.idle.get(key, 0.0), self.inside)
                for key in self.vouched:
                    for event in self.watch.vouched(key, ONE, self.at, self.cpu_s):
                        self.brain.handle(Event(self.at, event))
                        seen.append(event)
                if self.agent_beats:
                    self.watch.node_heard(NODE, self.at)
            self.watch.look(self.brain, self.at)
            for silent in self.watch.tick(self.at):
                self.brain.handle(Event(self.at, silent))
                seen.append(silent)
        return seen


def test_a_process_that_never_says_hello_is_replaced() -> None:
    brain = Brain()
    brain.handle(Event(0.0, MasterStarted(ONE, SPEC)))
    brain.handle(Event(0.0, NodeJoined(NODE, "", 0, 0)))
    brain.handle(Event(0.0, MemberJoined(Role.PS, Slot(0), ONE, NODE, 1, Address(NODE, "x"))))
    brain.handle(Event(0.0, MemberJoined(Role.WORKER, Slot(0), ONE, NODE, 1)))
    time = Time(brain)
    time.beating = {W0, PS}
    assert time.run(SPEC.start_s - 1.0) == []
    silent, heard = time.run(3.0)
    assert isinstance(silent, MemberSilent) and silent.lost and silent.slot == 1
    assert heard == NodeHeard(NODE)  # it alone was silent: its node takes another one
    record = brain.members.workers[Slot(1)]
    assert record.member.incarnation == 2 and record.running
    assert time.run(SPEC.start_s - 5.0) == []


def test_everyone_beats_nothing_happens() -> None:
    assert Time(started()).run(60.0) == []


def test_a_silent_worker_is_suspect_then_lost_once_each() -> None:
    time = Time(started())
    time.run(2.0)
    time.beating.discard(W0)
    (suspect,) = time.run(4.0)
    assert isinstance(suspect, MemberSilent) and not suspect.lost
    assert 3.0 <= suspect.silent_s <= 3.0 + TICK_S
    lost, _ = time.run(10.0)
    assert isinstance(lost, MemberSilent) and lost.lost and (lost.role, lost.slot) == (Role.WORKER, 0)
    assert 8.0 <= lost.silent_s <= 8.0 + TICK_S


def test_a_suspect_that_is_heard_again_is_forgiven() -> None:
    time = Time(started())
    time.beating.discard(W1)
    time.run(4.0)
    time.beating.add(W1)
    heard = time.run(2.0)
    assert [type(e) for e in heard] == [MemberHeard]
    assert time.run(30.0) == []


def test_who_holds_its_interpreter_is_waited_for_as_long_as_its_agent_says_that_it_runs() -> None:
    time = Time(started())
    time.run(2.0)
    time.beating.discard(W0)
    time.vouched = {W0}
    assert time.run(300.0) == []
    time.vouched = set()  # stopped, or gone
    suspect, lost, _ = time.run(12.0)
    assert isinstance(suspect, MemberSilent) and isinstance(lost, MemberSilent)
    assert lost.lost and not lost.why and lost.slot == 0


def test_a_suspect_of_which_its_agent_says_that_it_runs_is_none() -> None:
    time = Time(started())
    time.beating.discard(W1)
    time.run(4.0)
    time.vouched = {W1}
    assert [type(e) for e in time.run(2.0)] == [MemberHeard]


def test_a_group_waits_for_who_holds_its_interpreter_and_not_for_who_is_stopped() -> None:
    time = Time(started())
    time.run(5.0)
    time.beating = {W1, PS}
    time.vouched = {W0, W1, PS}
    time.run(20.0)
    assert time.watch.stalled(time.brain, time.at) == ()
    time.vouched = {W1, PS}
    time.run(2.0)
    assert time.watch.stalled(time.brain, time.at) == (0,)


def test_a_script_without_progress_is_lost_after_its_time_though_it_beats() -> None:
    time = Time(started())
    time.run(2.0)
    found: list[WatchEvent] = []
    for second in range(700):
        time.idle = {W0: float(second)}
        found += (now := time.run(1.0))
        assert not now or second > 590
    (lost, *_) = found
    assert isinstance(lost, MemberSilent) and lost.lost and "no progress for 600 s" in lost.why
    assert 595.0 <= lost.silent_s <= 606.0 or lost.why
    assert time.brain.members.workers[Slot(0)].member.incarnation == 2


def test_a_script_that_holds_its_interpreter_for_good_is_lost_after_its_time() -> None:
    time = Time(started())
    time.run(2.0)
    time.beating.discard(W0)
    time.vouched = {W0}
    assert time.run(590.0) == []
    assert [i.key for i in time.watch.idle(time.at)] == [W0]
    (lost, *_) = time.run(20.0)
    assert isinstance(lost, MemberSilent) and lost.lost and "no progress" in lost.why


def test_outside_of_the_loop_who_uses_a_processor_makes_progress() -> None:
    time = Time(started())
    time.inside, time.vouched = False, {W0, W1, PS}
    for second in range(900):
        time.idle = {W0: float(second), W1: float(second)}
        time.cpu_s += 0.5
        assert time.run(1.0) == []


def test_no_limit_no_loss() -> None:
    spec = msgspec.structs.replace(SPEC, progress_timeout="off")
    time = Time(started())
    time.watch = HeartbeatWatch(spec)
    time.watch.look(time.brain, 0.0)
    time.beating.discard(W0)
    time.vouched = {W0}
    assert time.run(2000.0) == []


def test_a_ps_that_runs_and_says_nothing_is_stuck() -> None:
    time = Time(started())
    time.beating.discard(PS)
    time.vouched = {PS}
    assert time.run(55.0) == []
    (lost, *_) = time.run(10.0)
    assert isinstance(lost, MemberSilent) and lost.lost and lost.role == Role.PS


def test_what_a_tick_is_late_by_counts_against_nobody() -> None:
    time = Time(started())
    time.run(5.0)
    for _ in range(4):  # each pause is too short to be one of the master's, and all heartbeats lie unread meanwhile
        time.at += 1.2
        time.watch.look(time.brain, time.at)
        assert time.watch.tick(time.at) == []
        assert time.watch.stalled(time.brain, time.at) == ()


def test_a_pause_of_the_master_costs_nobody_anything() -> None:
    time = Time(started())
    time.run(2.0)
    time.at += 100.0  # SIGSTOP of the master: beats lie unread
    assert time.run(2.0) == []


def test_a_clock_that_goes_back_costs_nobody_anything() -> None:
    time = Time(started())
    time.at = 1000.0
    time.run(2.0)
    time.at = 500.0
    assert time.run(30.0) == []


def test_after_a_restart_of_the_master_everyone_known_has_the_full_time() -> None:
    brain = started()
    watch = HeartbeatWatch(SPEC)
    watch.look(brain, 1000.0)
    ticks = [1000.0 + TICK_S * n for n in range(1, 60)]
    lost = [(at, e) for at in ticks for e in watch.tick(at) if isinstance(e, MemberSilent) and e.lost]
    assert {(e.role, e.slot) for _, e in lost} == {(Role.WORKER, 0), (Role.WORKER, 1), (Role.PS, 0)}
    assert all(at - 1000.0 >= 8.0 for at, _ in lost)


def test_a_silent_agent_is_no_lost_node_while_its_members_beat() -> None:
    time = Time(started())
    time.agent_beats = False
    assert time.run(60.0) == []


def test_a_node_of_a_silent_process_takes_another_one_only_when_its_agent_is_heard() -> None:
    time = Time(started())
    time.run(2.0)
    time.beating.discard(W0)
    time.run(7.5)
    time.agent_beats = False
    *_, lost = time.run(5.0)
    assert isinstance(lost, MemberSilent) and lost.lost
    record = time.brain.members.workers[Slot(0)]
    assert record.waiting and not record.running
    time.agent_beats = True
    (heard,) = time.run(1.0)
    assert isinstance(heard, NodeHeard)
    assert record.running and not record.waiting and record.member.incarnation == 2


def test_a_silent_node_is_lost_and_named_before_its_members() -> None:
    time = Time(started())
    time.agent_beats = False
    time.beating = set()
    events = [e for e in time.run(20.0) if not (isinstance(e, MemberSilent) and not e.lost)]
    assert isinstance(events[0], NodeLost)
    assert len([e for e in events if isinstance(e, NodeLost)]) == 1


def test_a_lease_without_progress_expires_and_one_with_progress_does_not() -> None:
    brain = started()
    for slot in (Slot(0), Slot(1)):
        brain.handle(Event(0.0, ShardAsked(0, 1, 1), by_worker(slot, ONE)))
    time = Time(brain)
    stuck, moving = sorted(held.no for held in brain.leases.values())
    position = 10
    expired: list[WatchEvent] = []
    for _ in range(25):
        time.progress = {moving: position}
        expired += time.run(1.0)
        position += 1
    (event,) = expired
    assert isinstance(event, LeaseExpired) and event.lease == stuck
    assert event.idle_s >= 20.0
    assert time.watch.position(moving, 0) == position - 1


def test_a_replaced_process_is_not_heard() -> None:
    watch = HeartbeatWatch(SPEC)
    watch.tick(0.0)
    watch.heard(W0, Incarnation(2), 0.0)
    events: list[WatchEvent] = []
    for n in range(1, 40):
        watch.heard(W0, Incarnation(1), n * TICK_S)
        events += watch.tick(n * TICK_S)
    assert any(isinstance(e, MemberSilent) and e.lost and e.incarnation == 2 for e in events)


def test_forget_stops_the_clock() -> None:
    watch = HeartbeatWatch(SPEC)
    watch.heard(W0, ONE, 0.0)
    watch.forget(W0, ONE)
    assert [e for n in range(60) for e in watch.tick(n * TICK_S)] == []


def test_a_worker_that_waits_for_others_keeps_only_the_leases_that_it_tells_of() -> None:
    """Of another one, the answer that granted it was lost."""
    watch, told, unknown = HeartbeatWatch(SPEC), LeaseNo(1), LeaseNo(2)
    watch.granted(told, ShardKey(0), 0, 0.0)
    watch.granted(unknown, ShardKey(1), 0, 0.0)
    events: list[WatchEvent] = []
    for n in range(int(2.5 * SPEC.lease_s / TICK_S)):
        at = n * TICK_S
        watch.heard(W0, ONE, at, ((told, 0),))
        watch.excuse(told, at)
        watch.excuse(unknown, at)
        events += watch.tick(at)
    assert [event.lease for event in events if isinstance(event, LeaseExpired)] == [unknown]
