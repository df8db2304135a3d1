"""The worker's protocol machine joined to ledgers in this process, answers delivered, lost or repeated by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from everstep.brain.events import EndOfData, Granted, Ok, Refused, Wait
from everstep.ids import Incarnation, LeaseNo, NodeId, PartitionId, ShardKey, Slot
from everstep.model.member import Address
from everstep.model.placement import Mirror, Placement, PsPlace
from everstep.model.shard import Lease, Token
from everstep.net.messages import Opened, Pushed
from everstep.tables.worker_protocol import (
    AskLater,
    AskShard,
    BatchFinished,
    Drop,
    Halt,
    RangeWork,
    SendDone,
    SendGiveBack,
    SendOpen,
    SendPush,
    WorkerAction,
    WorkerProtocol,
    WorkFinished,
    bitmap,
    watermarks_of,
)

PARTITIONS = 4


class Ps:
    """A ps as the design defines it: one shard table, a watermark and a fence per partition, a count per position."""

    def __init__(self, slot: int, n_ps: int) -> None:
        self.slot, self.incarnation = Slot(slot), Incarnation(1)
        self.partitions = [b for b in range(PARTITIONS) if b % n_ps == slot]
        self.marks: dict[tuple[int, int], int] = {}
        self.fence: dict[tuple[int, int], int] = {}
        self.counts: Counter[tuple[int, int, int]] = Counter()  # (shard, partition, position)

    def open(self, lease: Lease) -> tuple[list[int], list[int]] | None:
        keys = [(lease.shard, b) for b in self.partitions]
        if any(self.fence.get(k, 0) > lease.no for k in keys):
            return None
        for k in keys:
            self.fence[k] = lease.no
            self.marks.setdefault(k, lease.start)
        return self.partitions, [self.marks[k] for k in keys]

    def push(self, token: Token, partitions: bytes) -> Pushed:
        bits = int.from_bytes(partitions, "little") if partitions else -1
        if token.ps_incarnation != self.incarnation:
            return Pushed(0, 0, fenced=True)
        applied = repeats = 0
        gap, fenced = -1, False
        for b in self.partitions:
            if not bits >> b & 1:
                continue
            k = (token.shard, b)
            if self.fence[k] > token.lease:
                fenced = True
            elif token.hi <= self.marks[k]:
                repeats += 1
            elif token.lo == self.marks[k]:
                self.marks[k] = token.hi
                self.counts.update((token.shard, b, p) for p in range(token.lo, token.hi))
                applied += 1
            else:
                gap = self.marks[k] if gap < 0 else min(gap, self.marks[k])
        return Pushed(applied, repeats, gap, fenced)


def servers(n: int) -> tuple[list[Ps], Placement]:
    ps = [Ps(i, n) for i in range(n)]
    return ps, placement(ps, 1)


def placement(ps: list[Ps], version: int) -> Placement:
    places = tuple(PsPlace(p.slot, p.incarnation, Address(NodeId("node0"))) for p in ps)
    return Placement(version, tuple(Slot(b % len(ps)) for b in range(PARTITIONS)), places)


def machine(batch: int = 10, window: int = 2, ask_ahead: int = 0, slot: int = 0) -> WorkerProtocol:
    return WorkerProtocol(
        worker=Slot(slot), incarnation=Incarnation(1), batch_samples=batch, window=window, ask_ahead=ask_ahead
    )


def lease(no: int = 1, shard: int = 7, start: int = 100, stop: int = 130) -> Lease:
    return Lease(LeaseNo(no), ShardKey(shard), start, stop)


def only(actions: list[WorkerAction], kind: type) -> list[WorkerAction]:
    return [a for a in actions if isinstance(a, kind)]


def start(m: WorkerProtocol, ps: list[Ps], place: Placement, granted: Lease) -> list[WorkerAction]:
    """Bring ``m`` to ACTIVE on ``granted``; returns the actions of the last answer."""
    m.placement(place)
    (ask,) = m.begin(0, 1)
    assert isinstance(ask, AskShard)
    out = m.answered(ask.ask, Granted(granted))
    assert [a.ps for a in only(out, SendOpen)] == [p.slot for p in ps]  # type: ignore[attr-defined]
    return open_all(m, ps, granted)


def open_all(m: WorkerProtocol, ps: list[Ps], held: Lease) -> list[WorkerAction]:
    out: list[WorkerAction] = []
    for p in ps:
        answer = p.open(held)
        assert answer is not None
        out += m.opened(p.slot, held.no, p.incarnation, *answer)
    return out


def deliver(m: WorkerProtocol, ps: list[Ps], actions: list[WorkerAction]) -> list[WorkerAction]:
    """Every push arrives, every answer comes back."""
    out: list[WorkerAction] = []
    for a in actions:
        if isinstance(a, SendPush):
            out += m.pushed(a.ps, a.token, ps[a.ps].push(a.token, a.bitmap))
    return out


def compute(m: WorkerProtocol, batches: int) -> list[WorkerAction]:
    """The next batches; what is to be sent for them, in order."""
    out: list[WorkerAction] = []
    for _ in range(batches):
        work = m.next_work()
        assert work is not None
        out += m.computed(work)
    return out


def work_all(m: WorkerProtocol, ps: list[Ps]) -> tuple[list[RangeWork], list[WorkerAction]]:
    works, out = [], []
    while (work := m.next_work()) is not None:
        works.append(work)
        out += deliver(m, ps, m.computed(work))
    return works, out


def exactly_once(ps: list[Ps], held: Lease) -> bool:
    want = {(held.shard, b, p): 1 for q in ps for b in q.partitions for p in range(held.start, held.stop)}
    return sum((q.counts for q in ps), Counter()) == want


def test_a_shard_from_ask_to_done_and_the_end_of_the_data() -> None:
    ps, place = servers(2)
    m = machine()
    start(m, ps, place, lease())
    works, out = work_all(m, ps)
    assert [(w.lo, w.hi) for w in works] == [(100, 110), (110, 120), (120, 130)]
    assert all(w.partitions == {0: b"", 1: b""} for w in works)
    (done,) = only(out, SendDone)
    assert done == SendDone(lease(), ((Slot(0), Incarnation(1)), (Slot(1), Incarnation(1))), route=1)
    assert len(only(out, BatchFinished)) == 3
    (ask,) = m.done_answered(LeaseNo(1), Ok())
    assert ask == AskShard(0, 1, 2)
    assert m.answered(2, EndOfData()) == [WorkFinished()]
    assert m.finished and m.shards_done == 1 and m.retried == 0
    assert exactly_once(ps, lease())


def test_no_work_before_every_ps_has_opened() -> None:
    ps, place = servers(2)
    m = machine()
    m.placement(place)
    m.begin(0, 1)
    m.answered(1, Granted(lease()))
    partitions, marks = ps[0].open(lease()) or ([], [])
    m.opened(Slot(0), LeaseNo(1), Incarnation(1), partitions, marks)
    assert m.next_work() is None
    assert m.lost(Slot(0)) == []  # it has answered
    assert m.lost(Slot(1)) == [SendOpen(Slot(1), lease())]


def test_window_bounds_what_is_not_acknowledged() -> None:
    ps, place = servers(1)
    m = machine(window=2)
    start(m, ps, place, lease())
    held = compute(m, 2)
    assert m.next_work() is None and m.unacknowledged == 2
    deliver(m, ps, held[:1])
    assert m.next_work() is not None


def test_ragged_intervals_go_only_to_the_partitions_behind() -> None:
    ps, place = servers(2)
    old = machine(slot=1)
    start(old, ps, place, lease(no=1))
    first = old.next_work()
    assert first is not None
    pushes = old.computed(first)
    deliver(old, ps, pushes[:1])  # ps 0 has it; the worker dies before ps 1 gets it
    ps[0].marks[7, 0] = 125  # and partition 0 is further still
    ps[0].counts.update((7, 0, p) for p in range(110, 125))

    m = machine(batch=7)
    start(m, ps, place, lease(no=2))
    works, out = work_all(m, ps)
    assert [(w.lo, w.hi, w.partitions) for w in works] == [
        (100, 107, {1: b""}),
        (107, 110, {1: b""}),
        (110, 117, {0: bitmap([2], PARTITIONS), 1: b""}),
        (117, 124, {0: bitmap([2], PARTITIONS), 1: b""}),
        (124, 125, {0: bitmap([2], PARTITIONS), 1: b""}),
        (125, 130, {0: b"", 1: b""}),
    ]
    assert m.retried == 5
    assert only(out, SendDone) and exactly_once(ps, lease())


def test_a_shard_already_complete_is_reported_at_once() -> None:
    ps, place = servers(2)
    old = machine(slot=1)
    start(old, ps, place, lease(no=1))
    work_all(old, ps)  # the worker dies before its "done" arrives
    m = machine()
    out = start(m, ps, place, lease(no=2))
    assert only(out, SendDone) and m.next_work() is None
    assert exactly_once(ps, lease())


def test_lost_pushes_are_sent_again_in_order_and_repeats_count_once() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    sent = compute(m, 2)
    first = sent[0]
    assert isinstance(first, SendPush)
    ps[0].push(first.token, first.bitmap)  # applied, the answer is lost
    again = m.lost(Slot(0))
    assert [a.token for a in again] == [a.token for a in sent]  # type: ignore[attr-defined]
    deliver(m, ps, again)
    deliver(m, ps, sent)  # late answers change nothing
    work_all(m, ps)
    assert exactly_once(ps, lease())


def test_a_gap_reopens_and_reconciles() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    sent = compute(m, 2)
    out = deliver(m, ps, sent[1:])  # the first one never arrives
    assert len(only(out, SendOpen)) == 1 and not only(out, BatchFinished)
    assert m.next_work() is None
    again = open_all(m, ps, lease())  # the gradients are still there: nothing is computed again
    assert [(a.token.lo, a.token.hi) for a in only(again, SendPush)] == [(100, 110), (110, 120)]  # type: ignore[attr-defined]
    deliver(m, ps, again)
    works, out = work_all(m, ps)
    assert [(w.lo, w.retried) for w in works] == [(120, False)]
    assert only(out, SendDone) and exactly_once(ps, lease()) and m.retried == 0


def test_work_in_hand_outlives_a_new_life_that_kept_its_state() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    a, b = m.next_work(), m.next_work()
    assert a is not None and b is not None and m.current(b)
    ps[0].incarnation = Incarnation(2)
    out = m.placement(placement(ps, 2))
    assert len(only(out, SendOpen)) == 1
    assert m.current(a) and m.computed(a) == []  # not open: sent as soon as it is
    resent = open_all(m, ps, lease())
    assert [(p.token.lo, p.token.ps_incarnation) for p in only(resent, SendPush)] == [(100, 2)]  # type: ignore[attr-defined]
    deliver(m, ps, resent)
    assert m.current(b)
    deliver(m, ps, m.computed(b))
    works, _ = work_all(m, ps)
    assert [w.lo for w in works] == [120] and m.retried == 0
    assert exactly_once(ps, lease())


def test_work_that_the_partitions_can_not_take_as_it_is_is_computed_again() -> None:
    """Somebody else's batches were other ones: from the first that does not fit on, everything is stale."""
    ps, place = servers(1)
    m = machine(window=3)
    start(m, ps, place, lease())
    a, b, c = m.next_work(), m.next_work(), m.next_work()
    assert a is not None and b is not None and c is not None
    m.computed(a)
    ps[0].marks[7, 0] = 115  # a snapshot of another run of this shard
    ps[0].counts.update((7, 0, p) for p in range(100, 115))
    for mark in (1, 2, 3):
        ps[0].marks[7, mark] = 110
        ps[0].counts.update((7, mark, p) for p in range(100, 110))
    m.placement(placement(ps, 2))
    out = open_all(m, ps, lease())
    assert out == [BatchFinished(a, True)]  # all have it
    assert not m.current(b) and not m.current(c)
    assert m.computed(b) == [BatchFinished(b, False)] and m.computed(c) == [BatchFinished(c, False)]
    works, out = work_all(m, ps)
    assert [(w.lo, w.hi) for w in works] == [(110, 115), (115, 125), (125, 130)]
    assert exactly_once(ps, lease())


def test_joined_batches_of_which_a_reopening_kept_only_some_are_given_up() -> None:
    ps, place = servers(1)
    m = machine(window=4)
    start(m, ps, place, lease())
    a, b = m.next_work(), m.next_work()
    assert a is not None and b is not None
    joined = a.join(b)
    for partition in ps[0].partitions:
        ps[0].marks[7, partition] = 110
        ps[0].counts.update((7, partition, p) for p in range(100, 110))
    m.placement(placement(ps, 2))
    open_all(m, ps, lease())
    assert not m.current(a) and m.current(b)
    out = m.computed(joined)
    assert only(out, BatchFinished) == [BatchFinished(joined, False)] and only(out, SendOpen)
    open_all(m, ps, lease())
    works, _ = work_all(m, ps)
    assert [w.lo for w in works] == [110, 120] and exactly_once(ps, lease())


def move(ps: list[Ps], partition: int, to: int, version: int) -> Placement:
    """The partition goes with all it knows, as a promoted mirror does."""
    (source,) = (p for p in ps if partition in p.partitions)
    source.partitions.remove(partition)
    target = ps[to]
    target.partitions = sorted([*target.partitions, partition])
    for ledgers in ("marks", "fence"):
        for key, value in [(k, v) for k, v in getattr(source, ledgers).items() if k[1] == partition]:
            del getattr(source, ledgers)[key]
            getattr(target, ledgers)[key] = value
    owner = {b: p.slot for p in ps for b in p.partitions}
    places = tuple(PsPlace(p.slot, p.incarnation, Address(NodeId("node0"))) for p in ps)
    return Placement(version, tuple(owner[b] for b in range(PARTITIONS)), places)


def test_a_partition_that_moves_costs_no_computation() -> None:
    ps, place = servers(2)
    m = machine(window=3)
    start(m, ps, place, lease())
    a, b, c = m.next_work(), m.next_work(), m.next_work()
    assert a is not None and b is not None and c is not None
    pushes = m.computed(a)
    deliver(m, ps, pushes[:1])  # ps 0 has it, ps 1 not yet
    out = m.placement(move(ps, 2, 1, 2))
    assert len(only(out, SendOpen)) == 2
    assert deliver(m, ps, []) == [] and m.next_work() is None
    resent = open_all(m, ps, lease())
    assert [(p.ps, p.bitmap) for p in only(resent, SendPush)] == [(1, bitmap([1, 3], PARTITIONS))]  # type: ignore[attr-defined]
    deliver(m, ps, resent)
    for work in (b, c):
        pushes = m.computed(work)
        assert [(p.ps, p.bitmap) for p in only(pushes, SendPush)] == [(0, b""), (1, b"")]  # type: ignore[attr-defined]
        out = deliver(m, ps, pushes)
    assert only(out, SendDone) and m.retried == 0 and exactly_once(ps, lease())


def test_a_late_answer_does_not_count_for_a_partition_that_came_meanwhile() -> None:
    ps, place = servers(2)
    m = machine()
    start(m, ps, place, lease())
    a = m.next_work()
    assert a is not None
    pushes = [p for p in m.computed(a) if isinstance(p, SendPush)]
    late = ps[1].push(pushes[1].token, pushes[1].bitmap)  # the answer is under way while partition 2 comes to ps 1
    m.placement(move(ps, 2, 1, 2))
    again = [p for p in open_all(m, ps, lease()) if isinstance(p, SendPush)]
    assert [(p.ps, p.bitmap) for p in again] == [(0, b""), (1, bitmap([2], PARTITIONS))]
    assert m.pushed(Slot(1), pushes[1].token, late, pushes[1].life) == []
    deliver(m, ps, [*again])
    _, out = work_all(m, ps)
    assert only(out, SendDone) and exactly_once(ps, lease())


def test_a_map_that_differs_in_mirrors_only_changes_nothing() -> None:
    ps, place = servers(2)
    m = machine()
    start(m, ps, place, lease())
    newer = Placement(5, place.owner, place.servers, routing=1, mirrors=(Mirror(1, (PartitionId(0),), Slot(1)),))
    assert m.placement(newer) == [] and m.next_work() is not None


def test_nothing_is_computed_while_a_partition_has_no_living_owner() -> None:
    ps, place = servers(2)
    m = machine()
    start(m, ps, place, lease())
    m.placement(Placement(2, place.owner, place.servers[:1]))
    answer = ps[0].open(lease())
    assert answer is not None
    assert m.opened(Slot(0), LeaseNo(1), Incarnation(1), *answer) == [] and m.next_work() is None
    ps[1].incarnation = Incarnation(2)
    m.placement(placement(ps, 3))
    open_all(m, ps, lease())
    work_all(m, ps)
    assert exactly_once(ps, lease())


def test_who_is_behind_the_map_is_asked_again() -> None:
    ps, place = servers(2)
    m = machine()
    start(m, ps, place, lease())
    m.placement(move(ps, 2, 1, 2))
    assert m.opened(Slot(1), LeaseNo(1), Incarnation(1), [1, 3], [100, 100]) == []  # it has not heard of it
    assert m.awaits_open(Slot(1), LeaseNo(1)) and m.awaits_open(Slot(0), LeaseNo(1))
    open_all(m, ps, lease())
    assert not m.awaits_open(Slot(1), LeaseNo(1)) and m.next_work() is not None


def test_a_new_life_of_a_ps_undoes_what_its_old_one_acknowledged() -> None:
    ps, place = servers(2)
    m = machine()
    start(m, ps, place, lease())
    deliver(m, ps, compute(m, 1))
    ps[1] = Ps(1, 2)  # back from an empty snapshot
    ps[1].incarnation = Incarnation(2)
    m.placement(placement(ps, 2))
    assert m.opened(Slot(1), LeaseNo(1), Incarnation(1), [1, 3], [130, 130]) == []  # an answer of the dead one
    open_all(m, ps, lease())
    works, out = work_all(m, ps)
    assert works[0].partitions == {1: b""}
    (done,) = only(out, SendDone)
    assert isinstance(done, SendDone) and done.servers == ((0, 1), (1, 2))
    assert exactly_once(ps, lease())


@pytest.mark.parametrize("how", ["fenced push", "closed"])
def test_a_fenced_lease_is_dropped_and_given_back(how: str) -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease(no=1))
    pushes = compute(m, 1)
    ps[0].open(lease(no=2))  # somebody else has it now
    if how == "closed":
        out = m.closed(Slot(0), LeaseNo(1), "a later lease")
    else:
        out = deliver(m, ps, pushes)
    assert only(out, Drop) and m.held() == ()
    (back,) = only(out, SendGiveBack)
    assert isinstance(back, SendGiveBack) and back.lease == lease(no=1)
    assert only(out, AskShard) == [AskShard(0, 1, 2)]
    assert m.master_lost() == [AskShard(0, 1, 2), back]
    assert not ps[0].counts and m.shards_done == 0 and m.unacknowledged == 0


def test_answers_twice_or_late_are_ignored() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    assert m.answered(1, Granted(lease(no=9, shard=9))) == []
    work_all(m, ps)
    m.done_answered(LeaseNo(1), Ok())
    assert m.done_answered(LeaseNo(1), Ok()) == []
    assert m.closed(Slot(0), LeaseNo(1), "late") == []
    assert m.shards_done == 1


def test_refused_done_drops_the_shard() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    work_all(m, ps)
    out = m.done_answered(LeaseNo(1), Refused("not current"))
    assert only(out, Drop) and only(out, AskShard) and m.shards_done == 0


def test_wait_is_asked_again_with_the_same_number() -> None:
    m = machine()
    m.begin(0, 2)
    assert m.answered(1, Wait(0.5)) == [AskLater(1, 0.5)]
    assert m.master_lost() == []
    assert m.ask_again(1) == [AskShard(0, 2, 1)]
    assert m.ask_again(1) == []


def test_own_shard_done_ends_the_waiting() -> None:
    ps, place = servers(1)
    m = machine(ask_ahead=2)
    start(m, ps, place, lease())
    work_all(m, ps)
    assert m.more() == [AskShard(0, 1, 2)]
    m.answered(2, Wait(9.0))  # for our own shard, it may be
    assert m.done_answered(LeaseNo(1), Ok()) == [AskShard(0, 1, 2)]


def test_the_next_shard_opens_while_the_last_one_is_finished() -> None:
    ps, place = servers(2)
    m = machine(ask_ahead=2, window=3)
    start(m, ps, place, lease(no=1))
    a = m.next_work()
    assert a is not None
    assert m.more() == [AskShard(0, 1, 2)]
    second = lease(no=2, shard=8, start=130, stop=150)
    m.answered(2, Granted(second))
    assert [h.no for h in m.held()] == [1, 2]
    open_all(m, ps, second)
    b, c, d = m.next_work(), m.next_work(), m.next_work()
    assert b is not None and c is not None and d is not None
    assert (c.lo, c.hi, d.lo) == (120, 130, 130) and d.lease == second
    out = [x for w in (a, b, c, d) for x in deliver(m, ps, m.computed(w))]
    assert len(only(out, SendDone)) == 1
    assert exactly_once_both(ps, lease(no=1), Lease(LeaseNo(2), ShardKey(8), 130, 140))


def exactly_once_both(ps: list[Ps], *ranges: Lease) -> bool:
    want = {(r.shard, b, p): 1 for r in ranges for q in ps for b in q.partitions for p in range(r.start, r.stop)}
    return sum((q.counts for q in ps), Counter()) == want


def test_joined_batches_are_one_push_and_stop_at_a_shards_end() -> None:
    ps, place = servers(2)
    m = machine(window=4)
    start(m, ps, place, lease())
    a, b, c = m.next_work(), m.next_work(), m.next_work()
    assert a is not None and b is not None and c is not None
    group = a.join(b)
    assert not a.joins(c)
    with pytest.raises(ValueError, match="cannot be pushed together"):
        a.join(c)
    out = deliver(m, ps, m.computed(group))
    out += deliver(m, ps, m.computed(c))
    assert only(out, SendDone) and exactly_once(ps, lease())


def test_batch_size_may_change_at_any_moment() -> None:
    ps, place = servers(2)
    m = machine()
    start(m, ps, place, lease())
    sizes = iter([3, 11, 1, 30])
    works = []
    while (work := m.next_work()) is not None:
        works.append(work.hi - work.lo)
        m.set_batch_samples(next(sizes, 5))
        deliver(m, ps, m.computed(work))
    assert works == [10, 3, 11, 1, 5] and exactly_once(ps, lease())


def test_skipped_batches_move_the_watermarks_and_are_named() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    out: list[WorkerAction] = []
    while (work := m.next_work()) is not None:
        pushes = m.computed(work, skipped=work.lo == 110)
        assert all(p.skipped == (work.lo == 110) for p in only(pushes, SendPush))  # type: ignore[attr-defined]
        out += deliver(m, ps, pushes)
    (done,) = only(out, SendDone)
    assert isinstance(done, SendDone) and done.skipped == ((110, 120),)


def test_leaving_gives_everything_back_but_what_is_reported() -> None:
    ps, place = servers(1)
    m = machine(ask_ahead=2)
    start(m, ps, place, lease(no=1))
    a, b, c = m.next_work(), m.next_work(), m.next_work()
    assert a is not None and b is not None and c is not None
    m.more()
    second = lease(no=2, shard=8)
    m.answered(2, Granted(second))
    for w in (a, b, c):
        deliver(m, ps, m.computed(w))
    out = m.leave("scaled in")
    assert only(out, SendGiveBack) == [SendGiveBack(second, "scaled in")] and not m.finished
    m.given_back(LeaseNo(2))
    assert m.done_answered(LeaseNo(1), Ok()) == [WorkFinished()]


def test_a_grant_that_arrives_while_leaving_goes_back() -> None:
    m = machine()
    m.begin(0, 1)
    assert m.leave("SIGTERM") == []
    assert only(m.answered(1, Granted(lease())), SendGiveBack) == [SendGiveBack(lease(), "SIGTERM")]
    assert m.given_back(LeaseNo(1)) == [WorkFinished()]


def test_leaving_does_not_wait_for_a_shard_that_may_never_come() -> None:
    m = machine()
    m.begin(0, 1)
    assert m.leave("scaled in") == []  # the ask is under way: a grant would have to go back
    assert m.answered(1, Wait(0.05)) == [WorkFinished()]
    waiting = machine()
    waiting.begin(0, 1)
    waiting.answered(1, Wait(0.05))
    assert waiting.leave("scaled in") == [WorkFinished()]


def test_an_ask_that_is_refused_halts() -> None:
    m = machine()
    m.begin(0, 1)
    assert m.answered(1, Refused("dataset 0 is not registered")) == [Halt("dataset 0 is not registered")]


def test_a_replaced_worker_halts() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    out = m.fenced("worker:0 #2 has taken over")
    assert only(out, Halt) and m.next_work() is None and m.held() == ()


def test_a_lost_master_is_told_again_what_it_owes() -> None:
    ps, place = servers(1)
    m = machine(ask_ahead=2)
    start(m, ps, place, lease())
    work_all(m, ps)
    m.more()
    again = m.master_lost()
    assert len(only(again, SendDone)) == 1 and len(only(again, AskShard)) == 1
    assert m.revoked(LeaseNo(1)) != [] and only(m.master_lost(), SendDone) == []


def test_progress_follows_acknowledgements() -> None:
    ps, place = servers(1)
    m = machine()
    start(m, ps, place, lease())
    work = m.next_work()
    assert work is not None and m.progress() == ((1, 100),)
    pushes = m.computed(work)
    assert m.progress() == ((1, 100),)
    deliver(m, ps, pushes)
    assert m.progress() == ((1, 110),)


def test_watermarks_of_reads_little_endian_arrays() -> None:
    import numpy as np

    message = Opened(Incarnation(1), np.array([3, 7], "<i4").tobytes(), np.array([2**40, 5], "<i8").tobytes())
    assert watermarks_of(message) == ([3, 7], [2**40, 5])


@pytest.mark.parametrize("seed", range(200))
def test_random_loss_and_takeover_counts_every_position_once(seed: int) -> None:
    """Workers die, pushes and answers get lost, batch sizes vary: in the end every partition has every position
    once."""
    rng = random.Random(seed)
    ps, place = servers(rng.choice([1, 2, 3]))
    held = lease(start=0, stop=rng.randrange(1, 60))
    for no in range(1, 200):
        m = machine(batch=rng.randrange(1, 20), window=rng.randrange(1, 4))
        held = Lease(LeaseNo(no), held.shard, held.start, held.stop)
        done = only(start(m, ps, place, held), SendDone)
        queue: list[WorkerAction] = []
        for _ in range(rng.randrange(1, 40)):
            if done:
                break
            match rng.randrange(4):
                case 0 | 1:
                    if (work := m.next_work()) is not None:
                        queue += m.computed(work)
                case 2 if queue:
                    a = queue.pop(0)
                    out = deliver(m, ps, [a]) if rng.random() < 0.8 else []
                    if only(out, SendOpen):
                        queue.clear()
                        out += open_all(m, ps, held)
                    done += only(out, SendDone)
                case _ if not queue and m.unacknowledged:
                    for p in ps:
                        queue += m.lost(p.slot)
        if done:
            break
    else:
        pytest.fail(f"never done, seed {seed}")
    assert exactly_once(ps, held)


@pytest.mark.parametrize("seed", range(200))
def test_random_moves_and_losses_count_every_position_once(seed: int) -> None:
    """Partitions move with their books at any moment, workers die, pushes and answers get lost."""
    rng = random.Random(seed)
    ps, place = servers(rng.choice([2, 3]))
    version = 1
    held = lease(start=0, stop=rng.randrange(1, 60))
    for no in range(1, 200):
        m = machine(batch=rng.randrange(1, 20), window=rng.randrange(1, 4))
        held = Lease(LeaseNo(no), held.shard, held.start, held.stop)
        done = only(start_moved(m, ps, place, held), SendDone)
        queue: list[WorkerAction] = []
        works: list[RangeWork] = []
        for _ in range(rng.randrange(1, 60)):
            if done:
                break
            match rng.randrange(6):
                case 0 if (work := m.next_work()) is not None:
                    works.append(work)
                case 1 if works:
                    queue += m.computed(works.pop(0))
                case 2 if queue:
                    out = []
                    if rng.random() < 0.9:
                        out = deliver(m, ps, [queue.pop(0)])
                    else:
                        queue.pop(0)
                    if only(out, SendOpen):
                        queue = open_all(m, ps, held)
                        done += only(queue, SendDone)
                    done += only(out, SendDone)
                case 3 if rng.random() < 0.5:
                    partition, to = rng.randrange(PARTITIONS), rng.randrange(len(ps))
                    version += 1
                    place = move(ps, partition, to, version)
                    m.placement(place)
                    queue = open_all(m, ps, held)
                    done += only(queue, SendDone)
                case _ if not queue and m.unacknowledged:
                    for p in ps:
                        queue += m.lost(p.slot)
        if done:
            break
    else:
        pytest.fail(f"never done, seed {seed}")
    assert exactly_once(ps, held)


def start_moved(m: WorkerProtocol, ps: list[Ps], place: Placement, granted: Lease) -> list[WorkerAction]:
    m.placement(place)
    m.begin(0, 1)
    m.answered(1, Granted(granted))
    return open_all(m, ps, granted)
