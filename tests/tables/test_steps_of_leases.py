"""Steps that consume batches of several leases, and batches that wait for one: the worker's machine, real ledgers."""

from __future__ import annotations

from typing import NamedTuple

from everstep.brain.events import EndOfData, Granted, Ok, Wait
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.member import Address
from everstep.model.placement import Placement, PsPlace
from everstep.model.shard import Lease, Span
from everstep.native.ledger import PushLedger
from everstep.net.messages import Pushed
from everstep.tables.worker_protocol import (
    AskShard,
    BatchFinished,
    Drop,
    RangeWork,
    SendDone,
    SendGiveBack,
    SendOpen,
    SendPush,
    WorkerAction,
    WorkerProtocol,
    WorkFinished,
)

PARTITIONS = 4
ONE = Incarnation(1)
FIRST = Lease(LeaseNo(1), ShardKey(7), 100, 120)
SECOND = Lease(LeaseNo(2), ShardKey(8), 120, 140)


class Cluster(NamedTuple):
    """A worker with both leases open at two ps."""

    m: WorkerProtocol
    ps: list[PushLedger]

    def open(self, *leases: Lease) -> list[WorkerAction]:
        out: list[WorkerAction] = []
        for lease in leases:
            for slot, ledger in enumerate(self.ps):
                answer = ledger.open(lease.shard, lease.start, lease.no)
                if answer is None:
                    out += self.m.closed(Slot(slot), lease.no, "closed")
                else:
                    out += self.m.opened(Slot(slot), lease.no, ONE, *answer)
        return out

    def works(self, count: int) -> list[RangeWork]:
        found = [self.m.next_work() for _ in range(count)]
        assert all(w is not None for w in found)
        return [w for w in found if w is not None]

    def deliver(self, actions: list[WorkerAction]) -> list[WorkerAction]:
        """All pushes arrive, and their answers; what is said to that."""
        out: list[WorkerAction] = []
        for a in only(actions, SendPush):
            assert isinstance(a, SendPush)
            t, more = a.token, [(s.shard, s.lo, s.hi, s.lease, s.learnt) for s in a.more]
            r = self.ps[a.ps].push(t.shard, t.lo, t.hi, t.lease, a.bitmap, a.skipped, more)
            out += self.m.pushed(a.ps, t, Pushed(r.applied, r.repeats, r.gap, r.fenced), a.life)
        return out

    def marks(self, shard: int) -> list[int]:
        return [w for ledger in self.ps for w in (ledger.watermarks(shard) or ([], []))[1]]


def only(actions: list[WorkerAction], kind: type) -> list[WorkerAction]:
    return [a for a in actions if isinstance(a, kind)]


def cluster(window: int = 4) -> Cluster:
    owned = [[b for b in range(PARTITIONS) if b % 2 == slot] for slot in range(2)]
    m = WorkerProtocol(worker=Slot(0), incarnation=ONE, batch_samples=10, window=window, ask_ahead=9)
    places = tuple(PsPlace(Slot(s), ONE, Address(NodeId("node0"))) for s in range(2))
    m.placement(Placement(1, tuple(Slot(b % 2) for b in range(PARTITIONS)), places))
    made = Cluster(m, [PushLedger(PARTITIONS, partitions) for partitions in owned])
    m.begin(0, 1)
    m.answered(1, Granted(FIRST))
    made.open(FIRST)
    m.answered(2, Granted(SECOND))
    made.open(SECOND)
    return made


def step(m: WorkerProtocol, *works: RangeWork) -> list[WorkerAction]:
    return m.step([(work, True) for work in works])


def test_a_step_of_two_leases_is_one_push_to_each_ps() -> None:
    c = cluster()
    a, b, d, e = c.works(4)
    out = step(c.m, a, b, d)
    pushes = only(out, SendPush)
    assert [(p.ps, p.token.lo, p.token.hi, p.more) for p in pushes] == [  # type: ignore[attr-defined]
        (slot, 100, 120, (Span(SECOND.shard, 120, 130, SECOND.no),)) for slot in range(2)
    ]
    assert c.m.unacknowledged == 1
    said = c.deliver(out)
    (finished,) = only(said, BatchFinished)
    assert isinstance(finished, BatchFinished) and finished.applied
    assert (finished.work.lo, finished.work.hi, [(w.lo, w.hi) for w in finished.others]) == (100, 120, [(120, 130)])
    assert [d.lease for d in only(said, SendDone)] == [FIRST]  # type: ignore[attr-defined]
    said = c.deliver(step(c.m, e))
    assert [d.lease for d in only(said, SendDone)] == [SECOND]  # type: ignore[attr-defined]
    assert c.marks(7) == [120] * PARTITIONS and c.marks(8) == [140] * PARTITIONS


def test_a_push_of_two_leases_that_was_lost_is_sent_again_once() -> None:
    c = cluster()
    a, b, d, _ = c.works(4)
    out = step(c.m, a, b, d)
    again = c.m.lost(Slot(1))
    assert again == [p for p in only(out, SendPush) if p.ps == 1]  # type: ignore[attr-defined]
    c.deliver(out)
    assert c.deliver(again) == [] and c.m.unacknowledged == 0


def test_a_gap_dissolves_the_step_and_each_lease_is_computed_again() -> None:
    c = cluster()
    a, b, d, e = c.works(4)
    ahead = c.ps[1]
    assert ahead.push(8, 120, 125, 2).applied == 2  # what this ps has of the second shard, and the other has not
    out = step(c.m, a, b, d)
    said = c.deliver(out)
    assert c.marks(7) == [120, 120, 100, 100] and c.marks(8) == [130, 130, 125, 125]
    (finished,) = only(said, BatchFinished)
    assert isinstance(finished, BatchFinished) and not finished.applied and len(finished.others) == 1
    assert {o.lease.no for o in only(said, SendOpen)} == {1, 2}  # type: ignore[attr-defined]
    assert c.m.unacknowledged == 0 and c.m.next_work() is None
    c.open(FIRST, SECOND)
    assert not c.m.current(d) and not c.m.current(e)
    done: list[WorkerAction] = []
    seen: list[tuple[int, int, tuple[Slot, ...]]] = []
    while (work := c.m.next_work()) is not None:
        seen.append((work.lo, work.hi, tuple(work.partitions)))
        done += c.deliver(step(c.m, work))
    assert c.marks(7) == [120] * PARTITIONS and c.marks(8) == [140] * PARTITIONS
    assert {(100, 110, (1,)), (110, 120, (1,)), (125, 130, (1,))} <= {
        (lo, hi, tuple(map(int, at))) for lo, hi, at in seen
    }
    assert {d.lease for d in only(done, SendDone)} == {FIRST, SECOND}  # type: ignore[attr-defined]


def test_a_step_whose_first_lease_was_lost_gives_the_other_one_back_to_be_computed() -> None:
    c = cluster()
    a, b, d, e = c.works(4)
    out = step(c.m, a, b, d)
    said = c.m.revoked(FIRST.no)
    assert only(said, Drop) == [Drop(FIRST, "revoked by the master")]
    (finished,) = only(said, BatchFinished)
    assert isinstance(finished, BatchFinished) and not finished.applied
    assert {o.lease.no for o in only(said, SendOpen)} == {2}  # type: ignore[attr-defined]
    for ledger in c.ps:  # somebody else has it by now
        ledger.open(FIRST.shard, FIRST.start, 9)
    c.deliver(out)  # late: fenced
    assert c.marks(7) == [100] * PARTITIONS and c.marks(8) == [120] * PARTITIONS
    c.open(SECOND)
    assert not c.m.current(e)
    done: list[WorkerAction] = []
    while (work := c.m.next_work()) is not None:
        done += c.deliver(step(c.m, work))
    assert c.marks(8) == [140] * PARTITIONS and [d.lease for d in only(done, SendDone)] == [SECOND]  # type: ignore[attr-defined]


def test_a_step_with_a_batch_of_a_lease_that_is_gone_is_pushed_to_nobody() -> None:
    c = cluster()
    a, b, d, _ = c.works(4)
    for work in (a, b):
        c.m.hold_back(work)
    c.m.revoked(FIRST.no)
    assert not c.m.alike([a, b, d])
    said = step(c.m, a, b, d)
    assert not only(said, SendPush)
    (finished,) = only(said, BatchFinished)
    assert isinstance(finished, BatchFinished) and not finished.applied
    c.open(SECOND)
    while (work := c.m.next_work()) is not None:
        c.deliver(step(c.m, work))
    assert c.marks(7) == [100] * PARTITIONS and c.marks(8) == [140] * PARTITIONS


def test_the_second_lease_of_a_step_that_is_fenced_ends_and_the_first_is_not_lost() -> None:
    c = cluster()
    a, b, d, _ = c.works(4)
    for ledger in c.ps:
        ledger.open(SECOND.shard, SECOND.start, 9)
    said = c.deliver(step(c.m, a, b, d))
    assert c.marks(7) == [100] * PARTITIONS and c.marks(8) == [120] * PARTITIONS
    # Which lease the ps means is not in its answer. Either way both are computed by somebody: given back, or here.
    gone = {g.lease.no for g in only(said, SendGiveBack)}  # type: ignore[attr-defined]
    said = c.open(*[lease for lease in (FIRST, SECOND) if lease.no not in gone])
    gone |= {g.lease.no for g in only(said, SendGiveBack)}  # type: ignore[attr-defined]
    assert SECOND.no in gone and {h.no for h in c.m.held()} == {1, 2} - gone


def test_a_step_left_out_in_part_says_which_samples_count() -> None:
    c = cluster()
    a, b, d, _ = c.works(4)
    out = c.m.step([(a, True), (b, False), (d, True)])
    push = only(out, SendPush)[0]
    assert isinstance(push, SendPush)
    assert (push.token.lo, push.token.hi, push.skipped, push.left_out) == (100, 110, False, False)
    assert push.more == (Span(FIRST.shard, 110, 120, FIRST.no, False), Span(SECOND.shard, 120, 130, SECOND.no))
    said = c.deliver(out)
    assert only(said, BatchFinished) and c.marks(7) == [120] * PARTITIONS and c.marks(8) == [130] * PARTITIONS


def test_held_back_to_the_end_is_pending_and_ends_the_data_and_a_step_finishes_it() -> None:
    c = cluster()
    a, b, d, e = c.works(4)
    assert c.m.asking and c.m.asked == 3 and not c.m.pending
    c.m.answered(3, Wait(0.1))
    assert c.m.hold_back(a) == [] and c.m.hold_back(b) == []
    assert c.m.ask_again(3) == [AskShard(0, 1, 3, (FIRST.no,))] and not c.m.pending
    c.m.answered(3, Wait(0.1))
    c.m.hold_back(d)
    assert not c.m.pending and not c.m.ended
    c.m.hold_back(e)
    assert c.m.pending and not c.m.ended
    assert c.m.ask_again(3) == [AskShard(0, 1, 3, (FIRST.no, SECOND.no))]
    assert c.m.answered(3, EndOfData()) == []
    assert c.m.ended and not c.m.finished
    said = c.deliver(step(c.m, a, b, d, e))
    assert [d.lease for d in only(said, SendDone)] == [FIRST, SECOND]  # type: ignore[attr-defined]
    assert not c.m.pending
    assert c.m.done_answered(FIRST.no, Ok()) == []
    assert c.m.done_answered(SECOND.no, Ok()) == [WorkFinished()] and c.m.finished


def test_what_is_pending_and_does_not_fit_any_more_is_handed_out_again_after_the_end() -> None:
    c = cluster()
    works = c.works(4)
    for work in works:
        c.m.hold_back(work)
    c.m.answered(3, EndOfData())
    assert c.m.ended
    assert c.ps[0].push(7, 100, 105, 1).applied == 2  # a partition came back from a snapshot of another cut
    places = tuple(PsPlace(Slot(s), ONE, Address(NodeId("node0"))) for s in range(2))
    c.m.placement(Placement(2, tuple(Slot(b % 2) for b in range(PARTITIONS)), places))
    c.open(FIRST, SECOND)
    assert not c.m.ended and not c.m.pending
    while (work := c.m.next_work()) is not None:
        c.deliver(step(c.m, work))
    left = [work for work in works if c.m.current(work)]
    c.deliver(step(c.m, *left))
    assert c.marks(7) == [120] * PARTITIONS and c.marks(8) == [140] * PARTITIONS


def test_a_step_with_a_batch_and_the_one_handed_out_anew_for_it_is_pushed_to_nobody() -> None:
    """Simulator, mix lag, seed 10238: a script summed up both, though they are not ``alike``."""
    c = cluster()
    a, b, *_ = c.works(4)
    for work in (a, b):
        c.m.hold_back(work)
    for ps in c.ps:
        assert ps.push(7, 100, 105, 1).applied == 2  # all partitions stand inside the first batch
    places = tuple(PsPlace(Slot(s), ONE, Address(NodeId("node0"))) for s in range(2))
    c.m.placement(Placement(2, tuple(Slot(b % 2) for b in range(PARTITIONS)), places))
    c.open(FIRST, SECOND)
    c.m.set_batch_samples(5)
    c.deliver(step(c.m, *c.works(1)))
    c.m.set_batch_samples(10)
    [again] = c.works(1)
    assert (again.lo, again.hi) == (b.lo, b.hi) and not c.m.alike([b, again])
    out = step(c.m, b, again)
    assert not only(out, SendPush) and only(out, SendOpen), "its gradients hold these samples twice"
    c.open(FIRST)
    while (work := c.m.next_work()) is not None:
        c.deliver(step(c.m, work))
    assert c.marks(7) == [120] * PARTITIONS


def test_a_batch_is_split_and_its_halves_go_with_two_steps() -> None:
    c = cluster()
    a, b, *_ = c.works(4)
    halves = c.m.split(b, 113)
    assert halves is not None and [(h.lo, h.hi) for h in halves] == [(110, 113), (113, 120)]
    assert c.m.alike([a, *halves]) and not c.m.alike([a, b])
    c.deliver(step(c.m, a, halves[0]))
    assert c.marks(7) == [113] * PARTITIONS
    c.deliver(step(c.m, halves[1]))
    assert c.marks(7) == [120] * PARTITIONS
    assert c.m.split(b, 115) is None
