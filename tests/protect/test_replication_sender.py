"""The sender in C++ against ``PythonReplicationSender``, its oracle, call by call; and what a follower gets by
socket."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from everstep.errors import WireError
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind as BlobKind
from everstep.native import Store, _native
from everstep.net.append_frames import decode_append, encode_append
from everstep.net.frames import DATA_LIMITS, FrameKind, FrameSocket, _head
from everstep.net.messages import Append, StreamEntry
from everstep.protect.replication import (
    AppendCode,
    Batch,
    Outgoing,
    PeerKey,
    PythonReplicationSender,
    StreamItem,
    SyncTarget,
)
from everstep.protect.replication import StreamKind as Of
from everstep.protect.replication_sender import CarryOutcome, ReplicationSender
from everstep.protect.retained_log import PythonRetainedLog
from everstep.ps.mirror_server import _ReceiverLog

PEERS: list[PeerKey] = [(Slot(n), Incarnation(life)) for n, life in ((1, 1), (2, 4), (3, 2))]
PARTITIONS = [PartitionId(b) for b in range(4)]
OWNER = (Slot(0), Incarnation(1))
TABLE = TableSpec("t", 6, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1))


def facts(batch: Batch | None) -> object:
    if batch is None:
        return None
    items = tuple(i._replace(blob=bytes(i.blob)) for i in batch.items)
    return batch._replace(items=items, confirmed=tuple(sorted(batch.confirmed)))


@pytest.mark.parametrize("seed", range(20))
def test_the_carrier_is_its_oracle(seed: int) -> None:
    rng = random.Random(seed)
    one, two = PythonReplicationSender(), ReplicationSender(Store(4, 1), OWNER)
    seq, version, synced, ticket = 0, 1, dict.fromkeys(PARTITIONS, 0), 0
    some: list[PartitionId] = []
    sent: dict[PeerKey, Batch] = {}

    def each(name: str, *args: object) -> tuple[object, object]:
        return getattr(one, name)(*args), getattr(two, name)(*args)

    def agree(name: str, *args: object) -> object:
        a, b = each(name, *args)
        assert a == b, name
        return a

    each("live", set(PEERS), version)
    for _ in range(150):
        peer, partition = rng.choice(PEERS), rng.choice(PARTITIONS)
        match rng.choice(("route", "append", "append", "sweep", "some", "batch", "answer", "answer", "send", "live")):
            case "route":
                peers = tuple(rng.sample(PEERS, rng.randrange(4)))
                one.routes[partition] = two.routes[partition] = peers
                if not peers:
                    del one.routes[partition], two.routes[partition]
            case "append":
                entries = []
                for _ in range(rng.randrange(1, 6)):
                    seq += 1
                    b = rng.choice(PARTITIONS)
                    kind = rng.choice((Of.CHANGE, Of.CHANGE, Of.CHANGE, Of.HEADS, Of.BODIES, Of.MARKS))
                    if b in some:
                        kind = Of.SOME
                        some.remove(b)
                    synced[b] -= kind is Of.MARKS and synced[b] > 0
                    blob = rng.randbytes(rng.randrange(1, 30))
                    entries.append(Outgoing(b, seq, kind, blob, len(blob)))
                assert agree("append", ticket, entries) is not None
                ticket += len(entries)
            case "sweep":
                targets = [SyncTarget(p, rng.randrange(5), seq) for p in rng.sample(PEERS, rng.randrange(1, 3))]
                each("sync", partition, ticket + rng.randrange(2), targets)
                synced[partition] += 1
                if rng.random() < 0.3:
                    each("widen", partition, ticket + 1, SyncTarget(peer, 7, seq))
                if rng.random() < 0.2:
                    each("end_syncs", partition)
            case "some":
                each("some", partition, SyncTarget(peer, 3, seq))
                some.append(partition)
            case "batch":
                skip = rng.choice((0, 0, 0, 1, 3))  # so many are on their way already
                a, b = each("batch", peer, rng.randrange(1, 80), rng.randrange(1, 9), skip)
                assert facts(a) == facts(b)  # type: ignore[arg-type]
                if a is not None and not skip:
                    sent[peer] = a  # type: ignore[assignment]
            case "answer" if peer in sent:
                batch = sent[peer]
                codes = [rng.choice((0, 0, 0, 1, 2, 3, 4)) for _ in batch.items]
                agree("answered", peer, batch.first, codes)
                if rng.random() < 0.7:
                    del sent[peer]
            case "send":
                blob = rng.randbytes(9)
                kind = rng.choice((Of.CHANGE, Of.BODIES))
                each("send", peer, StreamItem(-1, partition, seq, kind, rng.randrange(3), 0, blob, len(blob)))
            case "live":
                version += 1
                left = set(rng.sample(PEERS, rng.randrange(2, 4)))
                each("live", left, version)
                sent = {}  # answers of before are to another stream
        for name in ("done_ticket", "refused_ticket", "next_ticket", "sync_bytes", "waiting_bytes", "levelling"):
            assert getattr(one, name) == getattr(two, name), name
        assert [one.owes(b) for b in PARTITIONS] == [two.owes(b) for b in PARTITIONS]
        assert [one.waits(p) for p in PEERS] == [two.waits(p) for p in PEERS]
        assert sorted(one.peers) == sorted(two.peers)


def test_a_feed_reads_as_it_was_written_and_nothing_else_does() -> None:
    entries = (StreamEntry(PartitionId(3), 17, 1, 40, 0), StreamEntry(PartitionId(1), 2, 3, 7, 5))
    message = Append(9, Slot(2), Incarnation(3), (), entries, (0, 4), ((PartitionId(3), 16),), 12, 8)
    header = encode_append(message)
    assert decode_append(header) == message
    for bad in (header[:-1], header + b"x", header[:20], b""):
        with pytest.raises(WireError, match="malformed append"):
            decode_append(bad)


class Mirrored:
    """An owner of partition 0 and a store with a complete mirror of it, behind a follower on one end of ``pair``."""

    def __init__(self) -> None:
        self.owner, self.home = Store(1, 1), Store(1, 1)
        for store in (self.owner, self.home):
            store.declare(TABLE)
        self.home.mirror_make(1, [0])
        self.owner.own([0])
        self.owner.protect([0], True)
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            self.owner.emit(0, kind, TABLE.id, 0, 64)
        self.owner.emit_marks(0)
        for blob, _ in self.emitted():
            assert self.home.mirror_apply(1, blob) == 0
        self.owner.open(0, 0, 1)
        self.receiver = _native.ReplicationReceiver(self.home)
        self.receiver.enter_alone()
        self.receiver.publish(5, [(0, OWNER, [1], False)])
        self.receiver.leave_alone()
        self.receiver.set_received(OWNER, (5, 0))
        self.pair = socket.socketpair()

    def emitted(self) -> list[tuple[bytes, int]]:
        _, entries, data = self.owner.take_outbox(1 << 30)
        return [(data[at : at + size].tobytes(), seq) for _, seq, _, at, size in entries]

    def push(self, at: int) -> None:
        keys, grads = np.arange(9), np.ones((9, TABLE.dim), np.float32)
        self.owner.push(0, at, at + 1, 1, b"", [(TABLE.id, keys, grads, -1.0)])

    def frame(self, first: int = 0, version: int = 5, confirmed: tuple[tuple[PartitionId, int], ...] = ()) -> bytes:
        blobs = self.emitted()
        entries = tuple(StreamEntry(PartitionId(0), seq, 1, len(blob)) for blob, seq in blobs)
        header = encode_append(Append(version, *OWNER, (), entries, (0,) * len(blobs), confirmed, first, 5))
        body = b"".join(blob for blob, _ in blobs)
        return _head(FrameKind.APPEND, header, (), len(body), 0) + body

    @property
    def state(self) -> object:
        return self.home.mirror_state(1), self.home.mirror_pages(1, TABLE.id)


@pytest.fixture
def mirrored() -> Iterator[Mirrored]:
    found = Mirrored()
    yield found
    for sock in found.pair:
        sock.close()


def test_what_comes_next_is_taken_and_answered_without_python(mirrored: Mirrored) -> None:
    m = mirrored
    m.push(0)
    m.push(1)
    frame = m.frame()  # the shard's opening and two pushes
    m.pair[0].sendall(frame)
    m.pair[0].shutdown(socket.SHUT_WR)
    assert _native.ReceiverConnection(m.receiver, m.pair[1].fileno(), b"").next() is None
    answer = FrameSocket(m.pair[0], DATA_LIMITS).recv()
    assert (answer.kind, answer.header) == (FrameKind.APPENDED, bytes(3))
    assert m.receiver.received(OWNER) == (5, 3)
    assert m.home.mirror_state(1) == [(0, m.owner.seq(0), True)]


def test_what_other_mirrors_may_lack_is_kept_until_they_have_it(mirrored: Mirrored) -> None:
    m = mirrored
    m.receiver.publish(5, [(0, OWNER, [1], True)])
    m.push(0)
    m.push(1)
    frame, last = m.frame(), m.owner.seq(0)
    m.pair[0].sendall(frame)
    m.push(2)
    # Of partitions of which nobody here takes its differences it can confirm nothing, and of none that there is not.
    said = ((PartitionId(0), last - 1), (PartitionId(7), 9), (PartitionId(-1), 9))
    m.pair[0].sendall(m.frame(first=3, confirmed=said))
    m.pair[0].shutdown(socket.SHUT_WR)
    assert _native.ReceiverConnection(m.receiver, m.pair[1].fileno(), b"").next() is None
    assert m.home.mirror_state(1) == [(0, last + 1, True)]
    kept = m.receiver.retained_after(0, -1)
    assert [seq for seq, _ in kept] == [last, last + 1]
    assert [seq for seq, _ in m.receiver.retained_after(0, last)] == [last + 1]
    other = Mirrored().home  # the blobs are what came: another mirror, three behind, gets there with the last of them
    assert frame.endswith(kept[0][1]) and other.mirror_apply(1, kept[0][1]) == AppendCode.GAP


@pytest.mark.parametrize("seed", range(5))
def test_the_inbox_keeps_tails_like_their_oracle(seed: int) -> None:
    rng = random.Random(seed)
    one, two, seq = PythonRetainedLog(), _ReceiverLog(_native.ReplicationReceiver(Store(4, 1))), 0
    for _ in range(300):
        partition = rng.choice(PARTITIONS)
        seq += rng.randrange(3)
        at, blob = seq - rng.randrange(4), rng.randbytes(rng.randrange(1, 20))
        what = rng.choice(("keep", "keep", "keep", "confirm", "drop", "clear" if rng.random() < 0.1 else "keep"))
        args = {"keep": (partition, at, blob), "confirm": (partition, at), "drop": (partition,), "clear": ()}[what]
        for tails in (one, two):
            getattr(tails, what)(*args)
        assert all(one.after(b, at) == two.after(b, at) and one.after(b, -1) == two.after(b, -1) for b in PARTITIONS)


@pytest.mark.parametrize("how", ["number", "version", "sender"])
def test_what_is_not_the_next_of_the_source_is_handed_on(mirrored: Mirrored, how: str) -> None:
    m = mirrored
    m.push(0)
    if how == "sender":
        m.receiver.publish(5, [(0, PEERS[0], [1], False)])
    before = m.state
    m.pair[0].sendall(m.frame(first=int(how == "number"), version=5 + (how == "version")))
    found = _native.ReceiverConnection(m.receiver, m.pair[1].fileno(), b"").next()
    assert found is not None and found[0] == FrameKind.APPEND and decode_append(found[2]).sender == OWNER[0]
    assert m.state == before and m.receiver.received(OWNER) == (5, 0)


def test_no_flipped_bit_of_a_feed_gets_into_a_mirror(mirrored: Mirrored) -> None:
    m = mirrored
    m.push(0)
    good, before = m.frame(), m.state
    for n in range(400):
        bad = bytearray(good)
        bit = n if n < 8 * 24 else random.Random(n).randrange(8 * len(good))
        bad[bit >> 3] ^= 1 << (bit & 7)
        here, there = socket.socketpair()
        with here, there:
            here.sendall(bad)
            here.shutdown(socket.SHUT_WR)
            try:
                found = _native.ReceiverConnection(m.receiver, there.fileno(), b"").next()
            except _native.Broken:
                found = None
            if found is not None:  # for the machine, which finds what is wrong
                message, body = decode_append(found[2]), found[3]
                sizes = np.array([e.size_bytes for e in message.entries], np.int64)
                with pytest.raises(ValueError, match="damaged"):
                    m.home.mirror_apply_many(np.ones(len(sizes), np.int64), np.cumsum(sizes) - sizes, sizes, body)
        assert m.state == before, bit
    m.pair[0].sendall(good)
    m.pair[0].shutdown(socket.SHUT_WR)
    assert _native.ReceiverConnection(m.receiver, m.pair[1].fileno(), b"").next() is None
    assert m.state != before


def test_who_carries_hears_of_a_peer_that_is_gone_and_is_not_held_up_for_ever() -> None:
    owner = Mirrored().owner
    carrier = ReplicationSender(owner, OWNER)
    carrier.live({PEERS[0]}, 3)
    carrier.append(0, [Outgoing(PartitionId(0), 0, Of.MARKS, b"", 0)] * 3)  # what was taken to begin the mirror
    carrier.routes[PartitionId(0)] = (PEERS[0],)
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (100_000).to_bytes(16, "little"))
    carrier.native.claim(PEERS[0])
    carrier.native.release(PEERS[0])
    carrier.native.link(PEERS[0], here.fileno(), owner.n_tables())
    after = owner.outbox_ticket()
    there.close()
    outcome, events = carrier.carry(0, after, 5.0)
    assert outcome is CarryOutcome.EVENTS and [e.peer for e in events] == [PEERS[0]]
    assert carrier.waits(PEERS[0]) and not carrier.native.claim(PEERS[0])
    carrier.native.release(PEERS[0])
    assert carrier.carry(0, after, 0.05)[0] is CarryOutcome.LATE
    carrier.native.stop()
    assert carrier.carry(0, after, 60.0)[0] is CarryOutcome.LATE
    carrier.live(set(), 4)
    assert carrier.carry(0, after, 60.0)[0] is CarryOutcome.CONFIRMED
    here.close()
