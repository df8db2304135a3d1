"""Streams: who gets what, when a ticket is done, what is sent again; bodies that do not fit."""

from __future__ import annotations

import pytest

from everstep.ids import Incarnation, PartitionId, Slot
from everstep.protect.port import Body
from everstep.protect.replication import (
    AppendCode,
    Outgoing,
    PeerKey,
    PythonReplicationSender,
    StreamItem,
    StreamKind,
    SyncTarget,
)

A: PeerKey = (Slot(1), Incarnation(1))
C: PeerKey = (Slot(2), Incarnation(4))
B0, B1 = PartitionId(0), PartitionId(1)


def change(partition: PartitionId, seq: int) -> Outgoing:
    return Outgoing(partition, seq, StreamKind.CHANGE, b"x" * 10, 10)


@pytest.fixture
def streams() -> PythonReplicationSender:
    s = PythonReplicationSender()
    s.live({A, C}, 7)
    s.routes = {B0: (A, C), B1: (A,)}
    return s


def test_a_ticket_is_done_when_all_who_got_it_have_answered(streams: PythonReplicationSender) -> None:
    streams.append(0, [change(B0, 1), change(B1, 1), change(PartitionId(5), 1)])
    assert streams.done_ticket == 0 and streams.waiting_bytes == 30
    assert streams.answered(A, 0, [AppendCode.APPLIED, AppendCode.APPLIED]) == {}
    assert streams.done_ticket == 0  # C lacks the first
    streams.answered(C, 0, [AppendCode.REPEAT])
    assert streams.done_ticket == 3 and streams.waiting_bytes == 0
    assert not streams.owes(B0)


def test_what_is_not_answered_is_sent_again_and_an_answer_twice_counts_once(streams: PythonReplicationSender) -> None:
    streams.append(0, [change(B1, n) for n in range(1, 5)])
    first = streams.batch(A, 20)
    assert first is not None and (first.stream, first.first, len(first.items)) == (7, 0, 2)
    again = streams.batch(A, 20)
    assert again is not None and again.items == first.items
    streams.answered(A, 0, [0, 0])
    streams.answered(A, 0, [0, 0])
    rest = streams.batch(A, 1)
    assert rest is not None and (rest.first, [i.seq for i in rest.items]) == (2, [3])  # at least one


def test_a_peer_that_is_gone_is_owed_nothing(streams: PythonReplicationSender) -> None:
    streams.append(0, [change(B0, 1)])
    streams.answered(A, 0, [0])
    streams.live({A}, 8)
    assert streams.done_ticket == 1
    assert streams.batch(C, 100) is None
    streams.append(1, [change(B0, 2)])  # its route is still there: nothing waits for it
    streams.answered(A, 1, [0])
    assert streams.done_ticket == 2


def test_a_refusal_is_remembered_and_tells_nobody_that_all_have_it(streams: PythonReplicationSender) -> None:
    streams.append(0, [change(B0, 1), change(B0, 2)])
    assert streams.answered(C, 0, [AppendCode.REFUSED, AppendCode.APPLIED]) == {B0: 0}
    streams.answered(A, 0, [0, 0])
    assert (streams.done_ticket, streams.refused_ticket) == (2, 0)
    streams.append(2, [change(B0, 3)])
    batch = streams.batch(A, 100)
    assert batch is not None and batch.confirmed == ((B0, 2),)  # of the second one only


def test_contents_go_to_who_wanted_them_up_to_the_marks(streams: PythonReplicationSender) -> None:
    streams.sync(B1, 1, [SyncTarget(C, 9, 3)])
    heads = Outgoing(B1, 1, StreamKind.HEADS, b"h", 1)
    streams.append(0, [heads, change(B1, 2), heads, Outgoing(B1, 2, StreamKind.MARKS, b"m", 1), heads])
    batch = streams.batch(C, 100)
    assert batch is not None  # not what stood in the outbox before the sweep, nor what came behind its end
    assert [(i.kind, i.ticket, i.mirror, i.sync) for i in batch.items] == [
        (StreamKind.HEADS, 2, 9, 3),
        (StreamKind.MARKS, 3, 9, 3),
    ]
    assert streams.sync_bytes == 2


def test_levelling_is_waited_for(streams: PythonReplicationSender) -> None:
    streams.send(A, StreamItem(-1, B0, 5, StreamKind.CHANGE, 3, 0, b"", 0))
    assert (streams.done_ticket, streams.levelling) == (0, 1)
    streams.answered(A, 0, [0])
    assert streams.levelling == 0


@pytest.mark.parametrize("sizes", [[3], [3, 3], [-1, 6], []])
def test_a_body_that_its_entries_do_not_make_up_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        Body(memoryview(b"12345"), sizes)
    body = Body(memoryview(b"12345"), [2, 0, 3])
    assert [bytes(b) for b in body] == [b"12", b"", b"345"]
