"""The audit's verdict is about the job: samples that are exact are not enough."""

from __future__ import annotations

import msgspec
import pytest

from everstep.brain.events import (
    Event,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    PlanRegistered,
    ProcessExited,
    ShardAsked,
    ShardDone,
    StopAsked,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.failure import Failure
from everstep.model.member import Address, Role
from everstep.model.shard import ShardSchedule, lease_no, shard_key
from everstep.monitor.audit import judged
from everstep.monitor.journal_fold import JournalFold
from everstep.monitor.report import EXIT_CODES, AuditReport, Offence, Verdict

W, ONE, NODE = Slot(0), Incarnation(1), NodeId("node0")


def job() -> JournalFold:
    """A job of one worker and one ps that is about to train a dataset of one shard."""
    fold = JournalFold()
    events: list[Event] = [
        Event(0.0, MasterStarted(ONE, JobSpec(workers=1, ps=1, partitions=2, max_restarts=0))),
        Event(1.0, NodeJoined(NODE, "", 0, 0)),
        Event(2.0, MemberJoined(Role.PS, W, ONE, NODE, 7, Address(NODE, "sock/ps-0.sock"))),
        Event(3.0, MemberJoined(Role.WORKER, W, ONE, NODE, 8)),
        Event(
            4.0, PlanRegistered(ShardSchedule(name="train", samples=30, shard_samples=30, seed=0)), by_worker(W, ONE)
        ),
        Event(5.0, ShardAsked(0, 1, 1), by_worker(W, ONE)),
    ]
    for event in events:
        fold.take(event)
    return fold


def trained() -> JournalFold:
    fold = job()
    lease = lease_no(Incarnation(1), 1)
    fold.take(Event(6.0, ShardDone(shard_key(0, 0, 0), lease, ((W, ONE),)), by_worker(W, ONE)))
    assert fold.brain.shards.samples_done == 30
    return fold


def end(fold: JournalFold, status: int, error: str = "", exit_code: int = 1) -> JournalFold:
    failure = Failure("script", "", 0, exit_code) if error else None
    fold.take(Event(9.0, ProcessExited(Role.WORKER, W, ONE, status, error, failure=failure)))
    return fold


def stopped() -> JournalFold:
    fold = trained()
    fold.take(Event(8.0, StopAsked("Ctrl-C")))
    return fold


CASES = {
    "well": (lambda: end(trained(), 0), Verdict.EXACT),
    "running": (trained, Verdict.OPEN),
    "stopped": (stopped, Verdict.OPEN),
    "raised": (lambda: end(trained(), 1, "ValueError: no"), Verdict.FAILED),
    "drifted": (lambda: end(trained(), 6, "in step 3 the members differ", 6), Verdict.REPLICAS),
    "lost behind the loop": (lambda: end(trained(), -9), Verdict.LOST),
    "lost before the end": (lambda: end(job(), -9), Verdict.FAILED),
    "nothing": (lambda: end(job(), 0), Verdict.NOTHING),
}


@pytest.mark.parametrize("case", CASES)
def test_each_end_has_a_verdict_of_its_own(case: str) -> None:
    build, verdict = CASES[case]
    report = judged(AuditReport("runs/x", counts={"shards_done": 0}), build())
    assert report.verdict is verdict, report.why
    assert (report.exit_code == 0) == (verdict is Verdict.EXACT)
    said = msgspec.json.decode(report.json())
    assert said["verdict"] == str(verdict) and said["exit_code"] == EXIT_CODES[verdict]


def test_exactly_once_alone_is_said_of_nothing_else() -> None:
    for case, (build, verdict) in CASES.items():
        report = AuditReport("runs/x", counts={"steps": 1, "void": 0, "samples": 1, "logs": 0, "generations": 1})
        report.counts["skipped_samples"] = 0
        first = judged(report, build()).text().splitlines()[0]
        assert first.endswith("exactly once") == (verdict is Verdict.EXACT), (case, first)


def test_an_offence_comes_before_everything_else() -> None:
    report = AuditReport("runs/x", offenders=[Offence("twice", "ps:0")])
    assert judged(report, end(trained(), -9)).verdict is Verdict.OFFENCES


def test_a_lease_of_an_epoch_that_the_loop_did_not_ask_for() -> None:
    """The worker is in its second loop, over epoch 1, and is given a shard of epoch 0."""
    fold = JournalFold()
    plan = ShardSchedule(name="train", samples=30, shard_samples=30, seed=0)
    events: list[Event] = [
        Event(0.0, MasterStarted(ONE, JobSpec(workers=1, ps=1, partitions=2, max_restarts=0))),
        Event(1.0, NodeJoined(NODE, "", 0, 0)),
        Event(2.0, MemberJoined(Role.PS, W, ONE, NODE, 7, Address(NODE, "sock/ps-0.sock"))),
        Event(3.0, MemberJoined(Role.WORKER, W, ONE, NODE, 8)),
        Event(4.0, PlanRegistered(plan, 2, 1, 2), by_worker(W, ONE)),
        Event(5.0, ShardAsked(0, 2, 1), by_worker(W, ONE)),
    ]
    for event in events:
        fold.take(event)
    wrong = fold.loops.of_lease(lease_no(ONE, 1), shard_key(0, 0, 0))
    assert wrong == "in loop 2 of the script, which is over epoch 1"
    fold.take(
        Event(5.5, ShardAsked(0, 2, 2, (lease_no(ONE, 1),)), by_worker(W, ONE))
    )  # held back, for a step in the next loop
    assert not fold.loops.of_lease(lease_no(ONE, 1), shard_key(0, 0, 0))
    fold.take(Event(6.0, PlanRegistered(plan, 1, 0, 1), by_worker(W, ONE)))
    report = AuditReport("runs/x", loops=[f"train e0 #0 was trained by worker:0 #1 {wrong}"])
    assert judged(report, trained()).verdict is Verdict.LOOPS and "LOOP train e0" in "\n".join(report._end())


def test_exit_codes_can_be_told_apart() -> None:
    assert len(set(EXIT_CODES.values())) == len(Verdict)
