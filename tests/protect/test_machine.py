"""Machines of several ps round toy stores: partitions and mirrors are dicts of ints, the network loses, repeats,
delays.

The toy's contents are integers by slot; a mirror of row 0 is their XOR, a mirror of row 1 the XOR of the contents
doubled ``i`` times over GF(2^8) for member ``i`` (as the real one, on one byte).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.member import Address
from everstep.model.placement import Mirror, MirrorKind, Placement, PsPlace
from everstep.net.messages import Appended, FetchContents, FetchLog, LogTaken, Moved, TransferOwnership
from everstep.protect.machine import REST, Acquired, Ask, LoadSnapshot, Machine, MirrorState, Released, Stuck
from everstep.protect.replication import Outgoing, PeerKey, PythonReplicationSender, StreamKind
from seeds import seeds

# ---------------------------------------------------------------- the toy store


def times(value: int, i: int) -> int:
    for _ in range(i):
        value = (value << 1) ^ (0x11D if value & 0x80 else 0)
    return value


def product(a: int, b: int) -> int:
    out = 0
    while b:
        if b & 1:
            out ^= a
        a, b = times(a, 1), b >> 1
    return out


def inverse(a: int) -> int:
    return next(x for x in range(1, 256) if product(a, x) == 1)


class Blob(msgspec.Struct, frozen=True):
    kind: StreamKind
    partition: int
    seq: int
    marks: int
    slots: dict[int, int] = {}
    lo: int = 0
    hi: int = 0


class Partition:
    def __init__(self) -> None:
        self.seq, self.marks = 0, 0
        self.slots: dict[int, int] = {}
        self.fenced = False

    def same(self, other: Partition) -> bool:
        mine = {k: v for k, v in self.slots.items() if v}
        return (self.seq, self.marks, mine) == (other.seq, other.marks, {k: v for k, v in other.slots.items() if v})


class ToyMirror:
    def __init__(self, members: Sequence[int], row: int) -> None:
        self.members, self.row = list(members), row
        self.slots: dict[int, int] = {}
        self.seq = dict.fromkeys(self.members, -1)
        self.marks = dict.fromkeys(self.members, 0)
        self.covered = dict.fromkeys(self.members, 0)
        self.complete: set[int] = set()
        self.rest: dict[int, int] | None = None
        self.lost: list[int] = []
        self.here: list[int] = []
        self.folded: dict[int, int] = {}
        self.other: dict[int, int] = {}

    def weight(self, partition: int) -> int:
        return times(1, self.members.index(partition)) if self.row else 1


SLOTS, PIECE = 12, 5


class ToyStore:
    def __init__(self) -> None:
        self.partitions: dict[int, Partition] = {}
        self.mirrors: dict[int, ToyMirror] = {}
        self.protected: set[int] = set()
        self.outbox: list[Outgoing] = []
        self.taken = 0

    def change(self, partition: int, slot: int, value: int) -> None:
        b = self.partitions[partition]
        assert not b.fenced
        old, b.slots[slot] = b.slots.get(slot, 0), value
        b.seq += 1
        b.marks += 1
        if partition in self.protected:
            self._out(Blob(StreamKind.CHANGE, partition, b.seq, b.marks, {slot: old ^ value}))

    def _out(self, blob: Blob) -> None:
        self.outbox.append(Outgoing(PartitionId(blob.partition), blob.seq, blob.kind, blob, 10))

    def take(self, n: int) -> tuple[int, list[Outgoing]]:
        first, out = self.taken, self.outbox[:n]
        del self.outbox[:n]
        self.taken += len(out)
        return first, out

    # Port

    def tables(self) -> list[int]:
        return [1]

    def own(self, partition: PartitionId) -> None:
        assert partition not in self.partitions
        self.partitions[partition] = Partition()

    def protect(self, partition: PartitionId, on: bool) -> None:
        (self.protected.add if on else self.protected.discard)(partition)

    def seq(self, partition: PartitionId) -> int:
        return self.partitions[partition].seq

    def hand_over(self, partition: PartitionId) -> int:
        self.partitions[partition].fenced = True
        return self.partitions[partition].seq

    def resume(self, partition: PartitionId) -> None:
        self.partitions[partition].fenced = False

    def drop(self, partition: PartitionId) -> None:
        assert self.partitions.pop(partition).fenced
        self.protected.discard(partition)

    def ticket(self) -> int:
        return self.taken + len(self.outbox)

    def emit(self, partition: PartitionId, kind: StreamKind, table: int, lo: int) -> int:
        b = self.partitions[partition]
        slots = {s: v for s, v in b.slots.items() if lo <= s < lo + PIECE} if kind is StreamKind.BODIES else {}
        self._out(Blob(kind, partition, b.seq, b.marks, slots, lo, lo + PIECE))
        return lo + PIECE if lo + PIECE < SLOTS else -1

    def emit_marks(self, partition: PartitionId) -> None:
        b = self.partitions[partition]
        self._out(Blob(StreamKind.MARKS, partition, b.seq, b.marks))

    def keep(self, blob: Blob) -> Blob:
        return blob

    def size(self, blob: Any) -> int:
        return 10

    def mirror_make(self, mirror: int, members: Sequence[PartitionId], row: int) -> None:
        assert mirror not in self.mirrors
        self.mirrors[mirror] = ToyMirror(members, row)

    def mirror_drop(self, mirror: int) -> None:
        del self.mirrors[mirror]

    def mirror_apply(self, mirror: int, blob: Blob) -> int:
        m, b = self.mirrors[mirror], blob.partition
        if b not in m.members:
            return 3
        if blob.kind is StreamKind.CHANGE:
            if b in m.complete:
                if blob.seq <= m.seq[b]:
                    return 1
                if blob.seq != m.seq[b] + 1:
                    return 2
            for slot, x in blob.slots.items():
                if b in m.complete or slot < m.covered[b]:
                    m.slots[slot] = m.slots.get(slot, 0) ^ product(x, m.weight(b))
                    if m.rest is not None and b not in m.lost and slot >= m.folded.get(b, 0):
                        m.rest[slot] = m.rest.get(slot, 0) ^ product(x, m.weight(b))
            m.seq[b], m.marks[b] = blob.seq, blob.marks
            return 0
        assert b not in m.complete, "contents of a member that is whole"
        if blob.kind is StreamKind.MARKS:
            assert m.covered[b] >= SLOTS
            m.complete.add(b)
        elif blob.kind is StreamKind.BODIES:
            assert blob.lo == m.covered[b], "contents out of order"
            m.covered[b] = blob.hi
            for slot, x in blob.slots.items():
                m.slots[slot] = m.slots.get(slot, 0) ^ product(x, m.weight(b))
        m.seq[b], m.marks[b] = blob.seq, blob.marks
        return 0

    def mirror_seq(self, mirror: int, partition: PartitionId) -> int:
        return self.mirrors[mirror].seq[partition]

    def mirror_complete(self, mirror: int) -> bool:
        m = self.mirrors[mirror]
        return m.complete == set(m.members)

    def promote(self, mirror: int, partition: PartitionId) -> None:
        m = self.mirrors.pop(mirror)
        assert m.members == [partition] and m.complete == {partition} and partition not in self.partitions
        b = self.partitions[partition] = Partition()
        scale = inverse(m.weight(partition))
        b.slots = {s: product(v, scale) for s, v in m.slots.items()}
        b.seq, b.marks = m.seq[partition], m.marks[partition]

    def recover_begin(self, mirror: int, lost: Sequence[PartitionId], here: Sequence[PartitionId]) -> None:
        m = self.mirrors[mirror]
        assert m.rest is None and self.mirror_complete(mirror)
        m.rest, m.lost, m.here, m.folded, m.other = dict(m.slots), list(lost), list(here), {}, {}

    def recover_fold(self, mirror: int, blob: Blob) -> None:
        m, b = self.mirrors[mirror], blob.partition
        assert m.rest is not None
        if blob.kind is StreamKind.BODIES:
            assert m.folded.get(b, 0) == blob.lo
            m.folded[b] = blob.hi
            for slot, x in blob.slots.items():
                m.rest[slot] = m.rest.get(slot, 0) ^ product(x, m.weight(b))

    def recover_other(self, mirror: int, blob: Blob) -> None:
        self.mirrors[mirror].other.update(blob.slots)

    def recover_emit(self, mirror: int, kind: StreamKind, table: int, lo: int) -> tuple[Blob, int]:
        rest = self.mirrors[mirror].rest
        assert rest is not None
        slots = {s: v for s, v in rest.items() if lo <= s < lo + PIECE} if kind is StreamKind.BODIES else {}
        return Blob(kind, REST, 0, 0, slots, lo, lo + PIECE), lo + PIECE if lo + PIECE < SLOTS else -1

    def recover_heads(self, mirror: int) -> bool:
        return False  # all of it at once, at the end

    def recover_end(self, mirror: int, abort: bool) -> None:
        m = self.mirrors[mirror]
        rest, m.rest = m.rest, None
        if abort:
            return
        assert rest is not None
        solved: dict[int, dict[int, int]] = {}
        if len(m.lost) == 1:
            scale = inverse(m.weight(m.lost[0]))
            solved[m.lost[0]] = {s: product(v, scale) for s, v in rest.items()}
        else:
            assert m.row == 0
            i, j = (m.members.index(b) for b in m.lost)
            gi, gj = times(1, i), times(1, j)
            scale = inverse(gi ^ gj)
            first = {s: product(m.other.get(s, 0) ^ product(gj, rest.get(s, 0)), scale) for s in range(SLOTS)}
            solved = {m.lost[0]: first, m.lost[1]: {s: first[s] ^ rest.get(s, 0) for s in range(SLOTS)}}
        for partition, slots in solved.items():
            assert partition in m.here and partition not in self.partitions
            b = self.partitions[partition] = Partition()
            b.slots, b.seq, b.marks = slots, m.seq[partition], m.marks[partition]


# ---------------------------------------------------------------- the world


class Ps:
    def __init__(self, slot: int, life: int) -> None:
        self.key: PeerKey = (Slot(slot), Incarnation(life))
        self.store, self.streams = ToyStore(), PythonReplicationSender()
        self.machine = Machine(*self.key, self.store, self.streams)
        self.stuck: list[str] = []


class World:
    """``truth``: what each partition must be at its newest confirmed change; ``acked``: its seq then."""

    def __init__(self, seed: int, n: int, partitions: int) -> None:
        self.random = random.Random(seed)
        self.ps: dict[PeerKey, Ps] = {}
        self.zombies: dict[PeerKey, Ps] = {}
        self.n_partitions = partitions
        self.lives = dict.fromkeys(range(n), 1)
        self.version = 0
        self.routing = 0
        self.owner = [b % n for b in range(partitions)]
        self.mirrors: list[Mirror] = []
        self.next_mirror = 1
        self.history: dict[int, dict[int, Partition]] = {b: {} for b in range(partitions)}
        self.acked = dict.fromkeys(range(partitions), 0)
        self.waiting: list[tuple[Ps, int, int, int]] = []  # ps, ticket before and after, partition, seq
        self.loss = 0.0
        for slot in range(n):
            self.ps[Slot(slot), Incarnation(1)] = Ps(slot, 1)

    # placements

    def publish(self, *, route: bool = True, to: float = 1.0) -> None:
        self.version += 1
        if route:
            self.routing = self.version
        self.tell(to)

    def placement(self) -> Placement:
        servers = tuple(PsPlace(*key, Address("node0")) for key in sorted(self.ps))
        owner = tuple(Slot(s) for s in self.owner)
        return Placement(self.version, owner, servers, self.routing, tuple(self.mirrors))

    def tell(self, to: float = 1.0) -> None:
        for p in self.ps.values():
            if self.random.random() < to:
                p.machine.place(self.placement())
                self.act(p)

    def mirror(self, members: Sequence[int], at: int, row: int = 0, kind: MirrorKind = MirrorKind.PARITY) -> int:
        ids = tuple(PartitionId(b) for b in members)
        self.mirrors.append(Mirror(self.next_mirror, ids, Slot(at), row, kind))
        self.next_mirror += 1
        return self.next_mirror - 1

    # running

    def at(self, slot: int) -> Ps:
        return self.ps[Slot(slot), Incarnation(self.lives[slot])]

    def act(self, p: Ps) -> None:
        for action in p.machine.take_actions():
            match action:
                case Acquired(partition=b):
                    partition = p.store.partitions[b]
                    known = self.history[b].get(partition.seq)
                    assert partition.seq >= self.acked[b], f"partition {b} lost {self.acked[b]}, has {partition.seq}"
                    if known is not None:
                        assert known.same(partition), f"partition {b} at {partition.seq} is not what it was"
                    for seq in [s for s in self.history[b] if s > partition.seq]:
                        del self.history[b][seq]
                case Stuck(why=why):
                    p.stuck.append(why)
                case Released() | LoadSnapshot():
                    pass

    def push(self, b: int) -> bool:
        for p in [*self.ps.values(), *self.zombies.values()]:
            partition = p.store.partitions.get(b)
            if partition is None or not p.machine.serves(PartitionId(b)) or partition.fenced:
                continue
            before = p.store.ticket()
            p.store.change(b, self.random.randrange(SLOTS), self.random.randrange(256))
            copy = Partition()
            copy.slots, copy.seq, copy.marks = dict(partition.slots), partition.seq, partition.marks
            if p.key in self.ps and self.owner[b] == p.key[0]:
                self.history[b][partition.seq] = copy
            if b in p.store.protected:
                self.waiting.append((p, before, p.store.ticket(), b, partition.seq))  # type: ignore[arg-type]
        return True

    def confirm(self) -> None:
        still = []
        for entry in self.waiting:
            p, before, after, b, seq = entry  # type: ignore[misc]
            if p.key not in self.ps and p.key not in self.zombies:
                continue
            if p.streams.refused_ticket >= before:
                continue  # answered Moved
            if p.streams.done_ticket >= after:
                self.acked[b] = max(self.acked[b], seq)
            else:
                still.append(entry)
        self.waiting = still

    def step(self, p: Ps) -> None:
        """One random thing at one ps."""
        r = self.random
        what = r.randrange(5)
        if what == 0:
            first, out = p.store.take(r.randrange(1, 6))
            p.streams.append(first, out)
        elif what == 1:
            peers = p.streams.peers
            if peers:
                self.deliver(p, r.choice(peers))
        elif what == 2:
            asks = p.machine.asks()
            if asks:
                self.ask(p, r.choice(asks))
        elif what == 3:
            p.machine.sync()
        else:
            p.machine.place(self.placement()) if p.key in self.ps else None
        if p.machine.dirty:
            p.machine.settle()
        self.act(p)
        self.confirm()

    def deliver(self, p: Ps, to: PeerKey) -> None:
        batch = p.streams.batch(to, self.random.choice((1, 25, 1000)))
        peer = self.ps.get(to) or self.zombies.get(to)
        if batch is None or peer is None or self.random.random() < self.loss:
            return
        answer = peer.machine.append(p.machine.append_of(batch), [i.blob for i in batch.items])
        if peer.machine.dirty:
            peer.machine.settle()
        self.act(peer)
        if isinstance(answer, Appended) and self.random.random() >= self.loss:
            for partition, ticket in p.streams.answered(to, batch.first, answer.applied).items():
                p.machine.refused(partition, ticket)

    def ask(self, p: Ps, ask: Ask) -> None:
        peer = self.ps.get(ask.peer)
        if peer is None or self.random.random() < self.loss:
            return
        blobs: list[Any] = []
        answer: Any
        match ask.request:
            case FetchContents() as want:
                answer = peer.machine.fetch_contents(want)
            case FetchLog() as tail:
                answer, blobs = peer.machine.fetch_log(tail)
            case TransferOwnership() as hand_over:
                answer = peer.machine.hand_over(hand_over)
        self.act(peer)
        if self.random.random() >= self.loss and not isinstance(answer, Moved):
            p.machine.answered(ask, answer, blobs)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.2:
                self.push(self.random.randrange(self.n_partitions))
            self.step(self.random.choice([*self.ps.values(), *self.zombies.values()]))

    def quiet(self) -> bool:
        return all(
            not p.machine.lacking
            and not p.machine.asks()
            and not p.machine.syncing
            and not p.store.outbox
            and p.streams.done_ticket == p.store.ticket()
            for p in self.ps.values()
        )

    def heal(self) -> None:
        self.loss = 0.0
        self.tell()
        for _ in range(60_000):
            self.step(self.random.choice(list(self.ps.values())))
            if self.quiet():
                break
        else:
            raise AssertionError(
                [(p.machine, p.machine.lacking, p.machine.asks(), p.streams) for p in self.ps.values()]
            )
        self.check()

    def check(self) -> None:
        """Every partition is served once, at its owner; every mirror is what its members make."""
        for b in range(self.n_partitions):
            at = [p for p in self.ps.values() if p.machine.serves(PartitionId(b))]
            assert [p.key[0] for p in at] == [self.owner[b]]
            assert at[0].store.partitions[b].seq >= self.acked[b]
        for m in self.mirrors:
            p = self.at(m.at)
            if m.id not in p.store.mirrors:
                assert m.id in p.machine._used
                continue
            toy = p.store.mirrors[m.id]
            assert m.id in p.machine.complete
            want: dict[int, int] = {}
            for b in m.members:
                partition = self.at(self.owner[b]).store.partitions[b]
                assert (toy.seq[b], toy.marks[b]) == (partition.seq, partition.marks)
                for s, v in partition.slots.items():
                    want[s] = want.get(s, 0) ^ product(v, toy.weight(b))
            assert {s: v for s, v in want.items() if v} == {s: v for s, v in toy.slots.items() if v}

    # losses

    def lose(self, slot: int, *, zombie: bool = False) -> None:
        """This ps is gone (a zombie: does not know it); a new one fills its slot."""
        gone = self.ps.pop((Slot(slot), Incarnation(self.lives[slot])))
        if zombie:
            self.zombies[gone.key] = gone
        self.lives[slot] += 1
        new = Ps(slot, self.lives[slot])
        self.ps[new.key] = new


def stripes(w: World, k: int, m: int) -> None:
    """Stripes of ``k`` neighbouring partitions (b at ps b mod n), mirrors at the ps after them."""
    n = len(w.lives)
    for first in range(0, w.n_partitions, k):
        members = list(range(first, min(first + k, w.n_partitions)))
        for row in range(m):
            w.mirror(members, (first + k + row) % n, row)


def test_mirrors_are_built_while_partitions_change() -> None:
    w = World(1, 4, 6)
    stripes(w, 3, 1)
    w.publish()
    w.run(3000)
    w.heal()
    assert sum(w.acked.values()) > 100


def test_a_replica_is_promoted_and_a_stripe_is_folded() -> None:
    for k in (1, 3):
        w = World(2, 5, 6)
        stripes(w, k, 1)
        w.publish()
        w.run(2000)
        w.heal()
        recover(w, 0)
        w.run(2000)
        w.heal()
        tidy(w)
        w.heal()


def asked(w: World, p: Ps) -> set[str]:
    """``p`` asks all that it wants to know, but nothing goes through its streams. What it asked contents for."""
    found: set[str] = set()
    for _ in range(20):
        for ask in p.machine.asks():
            if isinstance(ask.request, FetchContents):
                found.add(ask.request.purpose)
            w.ask(p, ask)
        p.machine.sync()
        if p.machine.dirty:
            p.machine.settle()
        w.act(p)
    return found


def test_the_rest_of_a_row_that_is_behind_is_wanted_only_when_it_has_caught_up() -> None:
    """ps:0 and ps:1 are lost, and the row at ps:3 lacks the last difference of partition 0. What is left of that row
    takes no differences of lost members, so one that comes after the question would be missing in what is decoded."""
    w = World(7, 4, 2)
    w.owner = [0, 1]
    w.mirror((0, 1), 2, 0)
    w.mirror((0, 1), 3, 1)
    w.publish()
    w.heal()
    w.push(0)
    owner, p = w.at(0), w.at(2)
    owner.streams.append(*owner.store.take(100))
    w.deliver(owner, p.key)
    w.lose(0)
    w.lose(1)
    w.owner = [2, 2]
    w.publish()
    assert p.store.mirrors[1].seq[0] == w.at(3).store.mirrors[2].seq[0] + 1
    assert "other" not in asked(w, p), "ps:3 does not have the difference yet"
    w.deliver(p, w.at(3).key)
    assert "other" in asked(w, p)
    w.heal()


def test_a_mirror_whose_contents_join_others_is_complete_only_when_all_have_what_came_before() -> None:
    """Contents go out once for two mirrors. The second was wished for when a difference had been made that the mirror
    at ps:1 does not have: nobody but its ps would have it to give, and it began after that difference."""
    w = World(11, 4, 1)
    w.mirror((0,), 1)
    w.publish()
    w.heal()
    p = w.at(0)

    def wished(at: int) -> None:
        w.mirror((0,), at)
        w.publish(route=False)
        asked(w, w.at(at))

    def sent() -> None:
        p.streams.append(*p.store.take(100))
        for at in (2, 3):
            while p.streams.waits(w.at(at).key):
                w.deliver(p, w.at(at).key)

    wished(2)
    assert p.machine.sync()  # the first heads
    w.push(0)
    sent()
    wished(3)
    while p.machine.sync():
        sent()
    assert p.streams.done_ticket < p.store.ticket(), "ps:1 lacks the difference"
    assert not w.at(3).machine.complete
    w.heal()
    assert w.at(3).machine.complete


def test_what_is_rebuilt_goes_out_before_new_mirrors_and_its_heads_before_all() -> None:
    """ps:0 is asked for partition 0 for a new mirror, then for partition 1, of which a member of its stripe is lost."""
    w = World(3, 3, 2)
    w.owner = [0, 0]
    w.mirror([0], 1)
    w.mirror([1], 2)
    w.publish()
    p = w.at(0)
    first, begun = p.store.take(100)
    p.streams.append(first, begun)
    for partition, at, purpose in ((0, 1, "build"), (1, 2, "fold")):
        request = FetchContents(1, Slot(at), Incarnation(1), 1 + partition, PartitionId(partition), purpose, sync=7)
        assert isinstance(p.machine.fetch_contents(request), LogTaken)
    pieces = -(-SLOTS // PIECE)
    while p.machine.sync(urgent=True):
        pass
    heads = [(int(e.partition), e.kind) for e in p.store.outbox]
    assert heads == [(1, StreamKind.HEADS)] * pieces, "all that requests wait for, and nothing else"
    p.streams.append(*p.store.take(100))
    while p.machine.sync():
        p.streams.append(*(taken := p.store.take(100)))
        heads += [(int(e.partition), e.kind) for e in taken[1]]
    bodies = [(1, StreamKind.BODIES)] * pieces + [(1, StreamKind.MARKS)]
    mirror = [(0, StreamKind.HEADS)] * pieces + [(0, StreamKind.BODIES)] * pieces  # its marks wait for the peers
    assert heads[pieces:] == bodies + mirror


def recover(w: World, slot: int, *, zombie: bool = False) -> None:
    """As the brain would: the ps of a complete mirror becomes the owner; mirrors that were lost are made anew."""
    complete = {i for p in w.ps.values() for i in p.machine.complete}
    lost = [b for b, s in enumerate(w.owner) if s == slot]
    ways = {b: [m for m in w.mirrors if b in m.members and m.id in complete and m.at != slot] for b in lost}
    if any(len(set(lost) & set(m.members)) > len(found) for found in ways.values() for m in found or w.mirrors[:1]):
        return  # beyond the protection
    if not all(ways.values()):
        return
    w.lose(slot, zombie=zombie)
    for b, found in ways.items():
        w.owner[b] = min(found, key=lambda m: (len(m.members), m.row)).at
    renew(w, lambda m: m.at == slot)
    w.publish(to=0.7)


def tidy(w: World) -> None:
    """After what changed hands is there: mirrors at their partition's own owner are made anew elsewhere."""
    w.mirrors = [m for m in w.mirrors if m.kind is not MirrorKind.MOVE or w.owner[m.members[0]] != m.at]
    renew(w, lambda m: len(m.members) == 1 and w.owner[m.members[0]] == m.at)
    w.publish(route=False, to=0.7)


def renew(w: World, what: Any) -> None:
    old, w.mirrors = w.mirrors, []
    for m in old:
        if not what(m):
            w.mirrors.append(m)
            continue
        taken = {w.owner[b] for b in m.members} | {o.at for o in old if set(o.members) & set(m.members) and o is not m}
        free = [s for s in w.lives if s not in taken] or list(w.lives)
        w.mirror(m.members, w.random.choice(free), m.row)


def test_two_members_of_a_stripe_are_lost_at_once() -> None:
    w = World(3, 6, 8)
    stripes(w, 4, 2)
    w.publish()
    w.run(3000)
    w.heal()
    rows = [m for m in w.mirrors if m.members == (0, 1, 2, 3)]
    w.lose(0)
    w.lose(1)
    for b, s in enumerate(w.owner):
        if s in (0, 1):
            stripe = [m for m in w.mirrors if b in m.members and m.at not in (0, 1)]
            w.owner[b] = min(stripe, key=lambda m: m.row).at
    assert w.owner[0] == w.owner[1] == rows[0].at
    renew(w, lambda m: m.at in (0, 1))
    w.publish()
    w.run(3000)
    w.heal()


def lose_a_difference(w: World, mirror: int) -> None:
    """What a mirror got last never came; the next one shows it. Returns when its ps has thrown it away."""
    m = next(m for m in w.mirrors if m.id == mirror)
    p = w.at(m.at)
    b = next(b for b in m.members if p.store.mirrors[mirror].seq[b] > 0)
    p.store.mirrors[mirror].seq[b] -= 1
    w.push(b)
    for _ in range(20_000):
        w.step(w.random.choice(list(w.ps.values())))
        if mirror in p.machine.inconsistent:
            return
    raise AssertionError(f"mirror {mirror} is still trusted")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_mirror_that_lacks_a_difference_is_made_again_and_nobody_ends(rows: int) -> None:
    w = World(7, 6, 8)
    stripes(w, 4, rows)
    w.publish()
    w.run(3000)
    w.heal()
    inconsistent = w.mirrors[0]
    lose_a_difference(w, inconsistent.id)
    p = w.at(inconsistent.at)
    assert inconsistent.id not in p.machine.complete and inconsistent.id not in p.machine.holdings().mirrors
    assert inconsistent.id not in p.store.mirrors
    w.run(500)  # what is pushed meanwhile is confirmed without it
    w.mirrors = [m for m in w.mirrors if m is not inconsistent]
    again = w.mirror(inconsistent.members, inconsistent.at, inconsistent.row)
    w.publish(route=False)
    w.heal()
    assert again in p.machine.complete and not p.machine.inconsistent
    recover(w, w.owner[0])  # and it is as good as the one before
    w.run(1000)
    w.heal()


def test_a_partition_whose_only_mirror_is_torn_while_it_is_rebuilt_is_said_to_be_stuck() -> None:
    w = World(8, 5, 4)
    stripes(w, 4, 1)
    w.publish()
    w.run(2000)
    w.heal()
    at = w.mirrors[0].at
    toy = w.at(at).store.mirrors[w.mirrors[0].id]
    w.lose(0)
    w.owner[0] = at
    w.publish()
    living = next(b for b in toy.members if b != 0 and toy.seq[b] > 0)
    toy.seq[living] -= 1
    w.at(w.owner[living]).store.change(living, 3, 99)
    for _ in range(20_000):
        w.step(w.random.choice(list(w.ps.values())))
        if w.at(at).machine.stuck:
            break
    assert w.at(at).machine.stuck == (0,)
    assert not w.at(at).machine.serves(PartitionId(0))


def test_a_partition_moves_while_it_changes() -> None:
    w = World(4, 4, 6)
    stripes(w, 3, 1)
    w.publish()
    w.run(1000)
    w.mirror([0], 3, kind=MirrorKind.MOVE)
    w.publish(route=False)
    w.run(2000)
    w.heal()
    w.owner[0] = 3
    w.publish(to=0.5)
    w.run(2000)
    w.heal()
    assert w.at(3).machine.serves(PartitionId(0))
    assert 0 not in w.at(0).store.partitions
    assert w.at(3).machine.ready() == [(w.version, "promoted", (0,))]


def test_a_partition_that_comes_back_goes_on_from_its_stripe_if_that_is_newer_than_what_was_kept() -> None:
    """Simulator, mix ps, seed 20991: the new owner took the partition, fed the stripe at the old one and was lost
    before it said that it has all; the old owner served what it had kept, and lost what the stripe had confirmed."""
    w = World(9, 5, 3)
    w.mirror([0, 1, 2], 3)
    w.publish()
    w.run(2000)
    w.heal()
    w.lose(0)
    w.owner[0] = 3  # where the stripe is: rebuilt out of it
    w.publish()
    w.heal()
    w.mirror([0], 4, kind=MirrorKind.MOVE)
    w.publish(route=False)
    w.heal()
    w.owner[0] = 4
    w.publish()
    said = w.ask
    w.ask = lambda p, a: None if isinstance(a.request, TransferOwnership) and a.request.done else said(p, a)  # type: ignore[method-assign]
    w.run(4000)
    assert w.at(4).machine.serves(PartitionId(0))
    w.ask = said  # type: ignore[method-assign]
    assert w.acked[0] > w.at(3).store.partitions[0].seq  # the stripe has what was kept, and more
    assert w.at(3).machine.partitions[PartitionId(0)] is MirrorState.FENCED
    w.lose(4)
    w.owner[0] = 3
    w.mirrors = w.mirrors[:1]
    w.publish()
    w.heal()
    assert w.at(3).machine.ready()[-1] == (w.version, "rebuilt", (0,))


def test_a_replaced_owner_that_does_not_know_it_confirms_nothing() -> None:
    w = World(5, 4, 4)
    stripes(w, 1, 1)
    w.publish()
    w.run(2000)
    w.heal()
    recover(w, 0, zombie=True)
    w.tell()
    zombie = next(iter(w.zombies.values()))
    for _ in range(4000):
        w.step(w.random.choice(list(w.ps.values())))
    assert zombie.machine.partitions[PartitionId(0)] is MirrorState.SERVING  # nobody told it
    before = zombie.store.ticket()
    zombie.store.change(0, 1, 77)
    for _ in range(2000):
        w.step(zombie)
    assert zombie.streams.refused_ticket >= before
    assert not zombie.machine.serves(PartitionId(0))
    w.heal()


def test_a_partition_without_any_way_here_is_said() -> None:
    w = World(6, 2, 2)
    w.publish()
    w.heal()
    w.lose(1)
    w.publish()
    assert "partition 1" in w.at(1).stuck[0]


@pytest.mark.parametrize("seed", seeds(12, 60))
def test_random_losses_moves_and_a_bad_network(seed: int) -> None:
    r = random.Random(seed)
    k, m = r.choice([(1, 1), (1, 2), (2, 1), (3, 1), (3, 2)])
    w = World(seed, k + m + 1 + r.randrange(2), r.randrange(2, 8))
    stripes(w, k, m)
    w.publish()
    for _ in range(5):
        w.loss = r.choice((0.0, 0.1, 0.5))
        w.run(r.randrange(300, 1500))
        move(w)
        w.run(r.randrange(300, 1500))
        w.heal()
        if w.mirrors and r.random() < 0.5:
            mark_inconsistent(w)
        switch(w)
        w.loss = r.choice((0.0, 0.3))
        w.run(r.randrange(0, 300))
        if r.random() < 0.7:
            w.heal()
            recover(w, r.choice(list(w.lives)), zombie=r.random() < 0.3)
            w.run(r.randrange(0, 300))
        w.heal()
        tidy(w)
    w.heal()
    assert sum(w.acked.values()) > 0


def move(w: World) -> None:
    """Begin to move one partition to a random ps."""
    b, to = w.random.randrange(w.n_partitions), w.random.choice(list(w.lives))
    if w.owner[b] != to and not any(x.kind is MirrorKind.MOVE for x in w.mirrors):
        w.mirror([b], to, kind=MirrorKind.MOVE)
        w.publish(route=False, to=0.5)


def mark_inconsistent(w: World) -> None:
    """One mirror lacks a difference; sooner or later the brain makes another."""
    whole = [m for m in w.mirrors if m.id in w.at(m.at).store.mirrors]
    if not whole:
        return
    m = w.random.choice(whole)
    if not any(s > 0 for s in w.at(m.at).store.mirrors[m.id].seq.values()):
        return
    lose_a_difference(w, m.id)
    w.run(w.random.randrange(0, 300))
    w.mirrors = [x for x in w.mirrors if x is not m]
    w.mirror(m.members, m.at, m.row, m.kind)
    w.publish(route=False, to=0.5)


def switch(w: World) -> None:
    """Partitions whose move mirrors are complete change hands."""
    complete = {i for p in w.ps.values() for i in p.machine.complete}
    for m in [x for x in w.mirrors if x.kind is MirrorKind.MOVE and x.id in complete]:
        w.owner[m.members[0]] = m.at
    w.publish(to=0.5)
