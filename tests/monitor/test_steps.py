"""The audit of mode allreduce: what is right passes, and whatever is changed is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Committed, Group, GroupMember, Position, StepSplit
from everstep.model.shard import ShardSchedule
from everstep.monitor.loops import Asked
from everstep.monitor.report import AuditReport
from everstep.monitor.steps import StepFold, StepLog, check_steps, read_step_log
from everstep.storage.chain import ChainWriter

PLANS = [ShardSchedule(name="d", samples=100, shard_samples=30, seed=0)]


def group(generation: int, slots: str, lineage: int = 1, begin: Position | None = None) -> Group:
    members = tuple(GroupMember(Slot(int(s)), Incarnation(1), NodeId("node0")) for s in slots)
    return Group(generation=generation, members=members, lineage=lineage, begin=begin or Position())


class Run:
    """Two workers and a third that joins; one total loss, back to step 6 of a checkpoint; two epochs."""

    def __init__(self) -> None:
        divided = msgspec.structs.replace(group(1, "01"), split=StepSplit(1, (3, 1)))  # within the generation
        self.groups = [group(1, "01"), divided, group(2, "012"), group(3, "34", 3, Position(6, 0, 1, 20))]
        self.announced = [
            Committed(1, 0, 3, 0, 0, 0, 80),
            Committed(2, 4, 4, 0, 0, 80, 100),
            Committed(2, 4, 4, 0, 0, 80, 100),  # said again
            Committed(2, 5, 7, 0, 1, 0, 60),
            Committed(3, 6, 9, 0, 1, 20, 100, ((40, 60),)),
        ]
        self.logs = {
            0: [Committed(1, 0, 1, 0, 0, 0, 40), Committed(1, 2, 3, 0, 0, 40, 80), Committed(2, 4, 4, 0, 0, 80, 100)],
            1: [Committed(1, 0, 3, 0, 0, 0, 80), Committed(2, 4, 4, 0, 0, 80, 100), Committed(2, 5, 7, 0, 1, 0, 60)],
            2: [Committed(2, 4, 4, 0, 0, 80, 100)],
            3: [Committed(3, 6, 9, 0, 1, 20, 100)],
            4: [Committed(3, 6, 7, 0, 1, 20, 60), Committed(3, 8, 9, 0, 1, 60, 100)],
        }

    def check(self, lost: frozenset[tuple[Slot, Incarnation]] = frozenset()) -> AuditReport:
        fold = StepFold()
        fold.lost = set(lost)
        fold.loops.asked = {1: {Asked(0, 0, 1)}, 2: {Asked(0, 1, 2)}}
        for g in self.groups:
            fold.published(g)
        fold.announced(self.announced)
        logs = [StepLog(Slot(slot), Incarnation(1), steps) for slot, steps in self.logs.items()]
        return check_steps(fold, PLANS, logs, "runs/x", True)


def test_what_is_right_passes_and_void_steps_are_told_apart() -> None:
    report = Run().check()
    assert report.ok, report.text()
    assert report.finished == ["d e0", "d e1"]
    assert report.counts["steps"] == 10 and report.counts["void"] == 2 and report.counts["samples"] == 200
    assert report.counts["skipped_samples"] == 20
    assert "exactly once" in report.text() and "2 more void" in report.text()


def _loop(index: int, loop: int) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.announced[index] = msgspec.structs.replace(run.announced[index], loop=loop)

    return change


@pytest.mark.parametrize(("index", "loop", "right"), [(0, 1, True), (0, 2, False), (3, 2, True), (3, 1, False)])
def test_steps_are_of_the_loop_that_asked_for_them(index: int, loop: int, right: bool) -> None:
    """Void steps do not count, steps of nobody knows which loop (0) may be of any."""
    run = Run()
    _loop(index, loop)(run)
    run.announced[-1] = msgspec.structs.replace(run.announced[-1], loop=2)
    report = run.check()
    assert report.ok and (not report.loops) == right, report.loops
    void = Run()
    void.announced[3] = msgspec.structs.replace(void.announced[3], first=6, lo=20, loop=1)
    assert not void.check().loops


def _edit(index: int, **fields: int) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.announced[index] = msgspec.structs.replace(run.announced[index], **fields)

    return change


def _log(slot: int, index: int, **fields: int) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.logs[slot][index] = msgspec.structs.replace(run.logs[slot][index], **fields)

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda run: run.announced.pop(0), "missing"),
        (lambda run: run.announced.pop(3), "missing"),  # the checkpoint is of a step that was never told
        (_edit(0, hi=90), "conflict"),
        (_edit(1, lo=70), "conflict"),
        (_edit(4, lo=0), "conflict"),
        (_edit(4, hi=90), "conflict"),
        (_edit(4, last=8), "missing"),
        (_edit(4, hi=120), "outside"),
        (_log(0, 1, lo=30), "conflict"),
        (_log(0, 1, first=1, lo=20), "twice"),
        (lambda run: run.logs[0].insert(1, run.logs[0][1]), "twice"),
        (lambda run: run.logs[0].pop(1), "missing"),
        (_log(2, 0, generation=1), "outside"),
        (_log(4, 0, hi=50), "conflict"),
        (lambda run: (run.logs[3].clear(), run.logs[4].clear()), "no log"),
        (lambda run: run.logs[3].append(Committed(3, 10, 10, 0, 2, 0, 20)), "missing"),
    ],
)
def test_what_is_changed_is_found(change: Callable[[Run], object], what: str) -> None:
    run = Run()
    change(run)
    report = run.check()
    assert not report.ok
    assert what in {o.what for o in report.offenders}, report.text()


def test_a_running_job_may_be_behind() -> None:
    fold = StepFold()
    fold.published(group(1, "01"))
    fold.announced([Committed(1, 0, 2, 0, 0, 0, 60)])
    logs = [StepLog(Slot(0), Incarnation(1), [Committed(1, 0, 3, 0, 0, 0, 80)])]
    report = check_steps(fold, PLANS, logs, "runs/x", False)
    assert report.ok and report.finished == []


def test_a_log_is_read_and_a_changed_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "worker-1.2.log"
    writer = ChainWriter(path, {"kind": "steps", "slot": 1, "incarnation": 2})
    steps = [Committed(1, 0, 0, 0, 0, 0, 20), Committed(1, 1, 1, 0, 0, 20, 40)]
    for one in steps:
        writer.append(msgspec.msgpack.encode(one))
    writer.close()
    assert read_step_log(path) == StepLog(Slot(1), Incarnation(2), steps)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    problem = read_step_log(path).problem
    assert problem is not None and problem.startswith("broken chain")
    path.write_bytes(path.read_bytes()[:-5])
    problem = read_step_log(path).problem
    assert problem is not None and problem.startswith("torn tail")


def test_steps_in_no_log_are_an_offence_unless_all_nodes_that_had_one_were_lost() -> None:
    run = Run()
    run.logs[0], run.logs[1] = run.logs[0][:1], run.logs[1][:0]  # steps from 2 on are in no log of generation 1
    both = frozenset({(Slot(0), Incarnation(1)), (Slot(1), Incarnation(1))})
    for lost in (frozenset[tuple[Slot, Incarnation]](), frozenset({(Slot(0), Incarnation(1))})):
        report = run.check(lost)
        assert not report.ok and "are in no worker's log" in report.text(), report.text()
    run.logs[2].append(Committed(2, 5, 7, 0, 1, 0, 60))
    report = run.check(both)
    assert report.ok, report.text()
    assert "worker:0 #1, worker:1 #1 was lost with the end of its log: of steps 0..3" in report.text(), report.text()
