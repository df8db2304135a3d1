"""A ps's store without rows: a partition is its marks and one integer, in which each applied sample flips its own bit.

So a range that is applied twice, or a difference that a mirror takes twice, is gone again, and one that is missing is
missing: contents are as telling as real bytes. Mirrors of row 0 are the XOR of their members; of row 1 the sum of
``g**i`` times member ``i`` over GF(4), bit by bit (an element is two integers): enough for stripes of three. Offers
what ``everstep.protect.machine.Port`` asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from everstep.ids import PartitionId
from everstep.native.ledger import PartitionLedger, PushLedger, PushResult, SpanTuple, bitmap_partitions
from everstep.protect.replication import AppendCode, Outgoing, StreamKind
from everstep.sim.kernel import Violation

Page = tuple[int, int]
"""An element of GF(4) per bit: the parts of 1 and of g."""

Marks = dict[int, tuple[int, int] | None]
"""Watermark and fence by shard; None: it was removed."""

TABLES = (1, 2)


def times(page: Page, power: int) -> Page:
    """Return ``page * g**power``; g * g = g + 1."""
    a, b = page
    for _ in range(power % 3):
        a, b = b, a ^ b
    return a, b


def plus(a: Page, b: Page) -> Page:
    return a[0] ^ b[0], a[1] ^ b[1]


class SimBlob(NamedTuple):
    """Is one entry of the outbox. ``bits``: what flips (CHANGE), or the contents under ``mask``."""

    kind: StreamKind
    partition: PartitionId
    seq: int
    fingerprint: int = 0
    marks: Marks | None = None
    bits: Page = (0, 0)
    mask: int = 0


class OpenChange:
    """Holds what changed in a partition since its mirrors' newest difference."""

    __slots__ = ("bits", "shards")

    def __init__(self) -> None:
        self.bits = 0
        self.shards: set[int] = set()


class Partition:
    """Is a partition that is here. ``content``: one bit per sample of each epoch. ``absent``: bits that are not back
    yet."""

    __slots__ = ("absent", "content", "ledger", "seq")

    def __init__(self) -> None:
        self.ledger = PartitionLedger()
        self.content = self.absent = 0
        self.seq = 0

    def copy(self) -> Partition:
        other = Partition()
        other.seq, other.content = self.seq, self.content
        other.ledger.fingerprint = self.ledger.fingerprint
        other.ledger.shards = {shard: list(mark) for shard, mark in self.ledger.shards.items()}
        return other

    def marks(self) -> Marks:
        return {shard: (mark[0], mark[1]) for shard, mark in self.ledger.shards.items()}


class _SimMember:
    """Holds what a mirror knows of one member."""

    __slots__ = ("complete", "covered", "fingerprint", "folded", "heads", "marks", "seq", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight  # power of g
        self.seq = -1
        self.covered = self.folded = 0  # masks
        self.heads = 0  # HEADS that were folded
        self.complete = False
        self.marks: Marks = {}
        self.fingerprint = 0

    def take(self, blob: SimBlob) -> None:
        self.seq, self.fingerprint = blob.seq, blob.fingerprint
        for shard, mark in (blob.marks or {}).items():
            if mark is None:
                self.marks.pop(shard, None)
            else:
                self.marks[shard] = mark


class SimMirror:
    """Holds the members' contents in one page."""

    __slots__ = (
        "early",
        "filled",
        "here",
        "lost",
        "members",
        "other",
        "other_heads",
        "other_mask",
        "page",
        "rest",
        "row",
    )

    def __init__(self, members: Sequence[PartitionId], row: int) -> None:
        self.members = {b: _SimMember(i if row else 0) for i, b in enumerate(members)}
        self.row = row
        self.page: Page = (0, 0)
        self.rest: Page | None = None  # being folded
        self.lost: tuple[PartitionId, ...] = ()
        self.here: tuple[PartitionId, ...] = ()
        self.other: Page = (0, 0)
        self.other_heads = self.other_mask = 0
        self.early = False  # the lost ones are here, as far as ``filled`` says
        self.filled = 0

    @property
    def complete(self) -> bool:
        return all(m.complete for m in self.members.values())


class SimStore:
    """Is a store of bits. ``samples``: positions in all epochs together; ``epoch_samples``: in one."""

    def __init__(self, ledger: PushLedger, samples: int, epoch_samples: int) -> None:
        self.ledger = ledger  # of the partitions that are served
        self.partitions: dict[PartitionId, Partition] = {}
        self.fenced: set[PartitionId] = set()
        self.mirrors: dict[int, SimMirror] = {}
        self.outbox: list[Outgoing] = []
        self.taken = 0
        self.samples, self.epoch_samples = samples, epoch_samples
        self.piece = samples // 3 + 1
        self._protected: set[PartitionId] = set()
        self.lag = False  # differences wait until they are flushed
        self.unsent: dict[PartitionId, OpenChange] = {}
        self._loading: set[PartitionId] = set()

    # ------------------------------------------------------------ workers

    def open(self, shard: int, start: int, lease: int) -> tuple[list[int], list[int]] | None:
        before = self._marks_of(shard)
        answer = self.ledger.open(shard, start, lease)
        self._changed(shard, before)
        return answer

    def push(self, spans: Sequence[SpanTuple], partitions: bytes) -> PushResult:
        """KeyError: a partition is not served here."""
        shard, lo, hi, lease, learnt = spans[0]
        shards = list(dict.fromkeys(span[0] for span in spans))
        before = {s: self._marks_of(s) for s in shards}
        result = self.ledger.push(shard, lo, hi, lease, partitions, not learnt, spans[1:])
        bits = 0
        for s, first, last, _, _ in spans:
            bits ^= self._bits(s, first, last)
        applied = bitmap_partitions(result.partitions) if result.partitions else list(self.ledger.partitions)
        flips = set(map(PartitionId, applied)) if result.applied else set()
        for b, entry in self.ledger.partitions.items():
            if (key := PartitionId(b)) not in flips:
                continue
            now = {s: (mark[0], mark[1]) for s in shards if (mark := entry.shards.get(s))}
            self._change(key, {s: mark for s, mark in now.items() if mark != before[s][b]}, bits)
        for s in shards:
            self._changed(s, before[s], flips)
        return result

    def release(self, shards: Iterable[int]) -> None:
        for shard in shards:
            before = self._marks_of(shard)
            self.ledger.release([shard])
            self._changed(shard, before)

    def _marks_of(self, shard: int) -> dict[int, tuple[int, ...] | None]:
        none: list[int] = []
        return {b: tuple(k.shards.get(shard, none)) or None for b, k in self.ledger.partitions.items()}

    def _changed(
        self,
        shard: int,
        before: dict[int, tuple[int, ...] | None],
        announced: Collection[PartitionId] = (),
    ) -> None:
        """Tell of the marks of ``shard`` that are not as ``before``. ``announced``: partitions that were told of."""
        for b, entry in self.ledger.partitions.items():
            mark = entry.shards.get(shard)
            if PartitionId(b) not in announced and (tuple(mark) if mark else None) != before[b]:
                self._change(PartitionId(b), {shard: (mark[0], mark[1]) if mark else None})

    def _change(self, key: PartitionId, marks: Marks, flipped: int = 0) -> None:
        partition = self.partitions[key]
        partition.content ^= flipped
        if self.lag and key in self._protected:
            if key not in self.unsent:
                partition.seq += 1
                self.unsent[key] = OpenChange()
            self.unsent[key].bits ^= flipped
            self.unsent[key].shards.update(marks)
            return
        partition.seq += 1
        if key in self._protected:
            self._out(SimBlob(StreamKind.CHANGE, key, partition.seq, partition.ledger.fingerprint, marks, (flipped, 0)))

    def flush(self, partition: PartitionId) -> None:
        """Make one difference of what is open."""
        found = self.unsent.pop(partition, None)
        if found is None:
            return
        b = self.partitions[partition]
        now = b.marks()
        marks: Marks = {shard: now.get(shard) for shard in sorted(found.shards)}
        blob = SimBlob(StreamKind.CHANGE, partition, b.seq, b.ledger.fingerprint, marks, (found.bits, 0))
        self._out(blob)

    def _out(self, blob: SimBlob) -> None:
        self.outbox.append(Outgoing(blob.partition, blob.seq, blob.kind, blob, 1))

    def take(self) -> tuple[int, list[Outgoing]]:
        first, out = self.taken, self.outbox
        self.outbox = []
        self.taken += len(out)
        return first, out

    # ------------------------------------------------------------ partitions

    def install(self, partition: PartitionId, what: Partition) -> None:
        """It is served from now on."""
        if partition in self.partitions or partition in self._loading:
            raise AssertionError(f"partition {partition} is here already")
        self.partitions[partition] = what
        self.resume(partition)

    def load_begin(self, partition: PartitionId) -> None:
        if partition in self.partitions or partition in self._loading:
            raise AssertionError(f"partition {partition} is loaded on top of what is here")
        self._loading.add(partition)

    def load_end(self, partition: PartitionId, what: Partition | None) -> None:
        """End the load. ``what``: its snapshot; None: it was not read after all."""
        self._loading.remove(partition)
        if what is not None:
            self.install(partition, what)

    def tables(self) -> Sequence[int]:
        return TABLES

    def own(self, partition: PartitionId) -> None:
        self.install(partition, Partition())

    def protect(self, partition: PartitionId, on: bool) -> None:
        if not on:
            self.flush(partition)
        (self._protected.add if on else self._protected.discard)(partition)

    def seq(self, partition: PartitionId) -> int:
        return self.partitions[partition].seq

    def hand_over(self, partition: PartitionId) -> int:
        self.flush(partition)
        self.fenced.add(partition)
        self.ledger.partitions.pop(partition, None)
        return self.partitions[partition].seq

    def resume(self, partition: PartitionId) -> None:
        self.fenced.discard(partition)
        self.ledger.partitions[partition] = self.partitions[partition].ledger
        self.ledger.partitions = dict(sorted(self.ledger.partitions.items()))

    def drop(self, partition: PartitionId) -> None:
        self.fenced.remove(partition)
        del self.partitions[partition]
        self.ledger.partitions.pop(partition, None)
        self._protected.discard(partition)
        self.unsent.pop(partition, None)

    def ticket(self) -> int:
        return self.taken + len(self.outbox)

    def _mask(self, lo: int) -> int:
        return ((1 << self.piece) - 1) << lo

    def emit(self, partition: PartitionId, kind: StreamKind, table: int, lo: int) -> int:
        self.flush(partition)
        b = self.partitions[partition]
        if kind is StreamKind.HEADS or table != TABLES[0]:
            self._out(SimBlob(kind, partition, b.seq, b.ledger.fingerprint))
            return -1
        mask = self._mask(lo)
        self._out(SimBlob(kind, partition, b.seq, b.ledger.fingerprint, None, (b.content & mask, 0), mask))
        return lo + self.piece if lo + self.piece < self.samples else -1

    def emit_slots(self, partition: PartitionId, table: int, slots: Sequence[int]) -> None:
        raise AssertionError("nobody waits for single rows here")

    def recover_emit_slots(self, mirror: int, table: int, slots: Sequence[int]) -> tuple[SimBlob, Sequence[int]]:
        raise AssertionError("nobody waits for single rows here")

    def emit_marks(self, partition: PartitionId) -> None:
        self.flush(partition)
        b = self.partitions[partition]
        self._out(SimBlob(StreamKind.MARKS, partition, b.seq, b.ledger.fingerprint, b.marks()))

    def keep(self, blob: SimBlob) -> SimBlob:
        return blob

    def size(self, blob: SimBlob) -> int:
        return 1

    # ------------------------------------------------------------ mirrors

    def mirror_make(self, mirror: int, members: Sequence[PartitionId], row: int) -> None:
        if mirror in self.mirrors:
            raise AssertionError(f"mirror {mirror} is here already")
        self.mirrors[mirror] = SimMirror(members, row)

    def mirror_drop(self, mirror: int) -> None:
        del self.mirrors[mirror]

    def mirror_apply(self, mirror: int, blob: SimBlob) -> int:
        m = self.mirrors[mirror]
        who = m.members.get(blob.partition)
        if who is None:
            return AppendCode.NO_MIRROR
        if blob.kind is StreamKind.CHANGE:
            if who.seq < 0:
                return AppendCode.APPLIED  # its contents will have it
            if blob.seq <= who.seq:
                return AppendCode.REPEAT
            if blob.seq != who.seq + 1:
                return AppendCode.GAP
            bits = blob.bits[0] if who.complete else blob.bits[0] & who.covered
            m.page = plus(m.page, times((bits, 0), who.weight))
            if m.rest is not None and blob.partition not in m.lost:
                m.rest = plus(m.rest, times((bits & ~who.folded, 0), who.weight))
            who.take(blob)
            return AppendCode.APPLIED
        if who.complete or (who.seq >= 0 and blob.seq != who.seq) or blob.mask & who.covered:
            raise AssertionError(
                f"contents of partition {blob.partition} out of order: {blob} for a member at {who.seq}"
            )
        m.page = plus(m.page, times(blob.bits, who.weight))
        who.covered |= blob.mask
        who.take(blob)
        if blob.kind is StreamKind.MARKS:
            who.complete = True
            who.marks = dict(blob.marks or {})
        return AppendCode.APPLIED

    def check_mirror(
        self, mirror: int, members: dict[PartitionId, Partition], dead: Collection[PartitionId] = ()
    ) -> None:
        """Check that a mirror at rest equals its members. Raises Violation. ``dead``: their owner died shortly before
        the end; it may not have sent that shards were released, but all samples are there."""
        m = self.mirrors[mirror]
        want: Page = (0, 0)
        for partition, who in m.members.items():
            real = members[partition]
            want = plus(want, times((real.content, 0), who.weight))
            if partition in dead:
                if who.fingerprint != real.ledger.fingerprint:
                    raise Violation(f"mirror {mirror} lacks samples of partition {partition}, whose owner is dead")
                continue
            if (who.seq, who.fingerprint, who.marks) != (real.seq, real.ledger.fingerprint, real.marks()):
                raise Violation(
                    f"mirror {mirror} has partition {partition} at {who.seq}, it is at {real.seq}, or marks differ"
                )
        if m.page != want:
            raise Violation(f"mirror {mirror} does not equal its members {list(m.members)}")

    def mirror_seq(self, mirror: int, partition: PartitionId) -> int:
        return self.mirrors[mirror].members[partition].seq

    def mirror_complete(self, mirror: int) -> bool:
        return self.mirrors[mirror].complete

    def _rebuilt(self, who: _SimMember, page: Page) -> Partition:
        partition = Partition()
        partition.seq, partition.content = who.seq, page[0]
        if page[1]:
            raise AssertionError("what was decoded is no contents")
        partition.ledger.fingerprint = who.fingerprint
        partition.ledger.shards = {shard: list(mark) for shard, mark in who.marks.items() if mark is not None}
        return partition

    def decoded(
        self, partition: PartitionId, mirrors: Iterable[int], others: Mapping[int, Partition]
    ) -> Partition | None:
        """Return what one of ``mirrors`` and the contents of its other members say that the partition has."""
        for m in (self.mirrors[mirror] for mirror in mirrors):
            rest = m.members.keys() - {partition}
            if m.complete and partition in m.members and rest <= others.keys():
                page = m.page
                for b in rest:
                    page = plus(page, times((others[b].content, 0), m.members[b].weight))
                who = m.members[partition]
                return self._rebuilt(who, times(page, 3 - who.weight))
        return None

    def promote(self, mirror: int, partition: PartitionId) -> None:
        m = self.mirrors.pop(mirror)
        who = m.members[partition]
        if len(m.members) != 1 or not who.complete:
            raise AssertionError(f"mirror {mirror} cannot become partition {partition}")
        self.install(partition, self._rebuilt(who, times(m.page, 3 - who.weight)))

    def recover_begin(self, mirror: int, lost: Sequence[PartitionId], here: Sequence[PartitionId]) -> None:
        m = self.mirrors[mirror]
        if m.rest is not None or not m.complete:
            raise AssertionError(f"mirror {mirror} cannot be folded")
        if any(b in self.partitions or b in self._loading for b in here):
            raise AssertionError(f"partitions {here} are to be rebuilt here, and one of them is here")
        m.rest, m.lost, m.here, m.other = m.page, tuple(lost), tuple(here), (0, 0)
        m.other_heads = m.other_mask = m.filled = 0
        m.early = False
        for who in m.members.values():
            who.folded = who.heads = 0

    def recover_heads(self, mirror: int) -> bool:
        m = self.mirrors[mirror]
        if m.rest is None or not m.here:
            return False
        rest = [who for partition, who in m.members.items() if partition not in m.lost]
        if any(who.heads < len(TABLES) for who in rest) or (len(m.lost) > 1 and m.other_heads < len(TABLES)):
            return False
        if not m.early:
            m.early = True
            for partition in m.here:
                made = self._rebuilt(m.members[partition], (0, 0))
                made.absent = (1 << self.samples) - 1
                self.install(partition, made)
            self._fill(m)
        return True

    def _fill(self, m: SimMirror) -> None:
        """Bring bits that are folded now back into the partitions that are early."""
        if not m.early:
            return
        new = ((1 << self.samples) - 1) & ~m.filled
        for partition, who in m.members.items():
            new &= who.folded if partition not in m.lost else new
        if len(m.lost) > 1:
            new &= m.other_mask
        m.filled |= new
        for partition, page in self._solved(m).items():
            if page[1] & new:
                raise AssertionError("what was decoded is no contents")
            self.partitions[partition].content ^= page[0] & new
            self.partitions[partition].absent &= ~new

    def lacks(self, bitmap: bytes, shard: int, lo: int, hi: int) -> bool:
        """Return whether rows that this range changes are still to come back in a partition that is addressed."""
        bits = self._bits(shard, lo, hi)
        named = bitmap_partitions(bitmap) if bitmap else list(self.ledger.partitions)
        return any(self.partitions[PartitionId(b)].absent & bits for b in named if b in self.ledger.partitions)

    def _bits(self, shard: int, lo: int, hi: int) -> int:
        return ((1 << (hi - lo)) - 1) << ((shard >> 32 & 0xFFFF) * self.epoch_samples + lo)

    def recover_fold(self, mirror: int, blob: SimBlob) -> None:
        m, who = self.mirrors[mirror], self.mirrors[mirror].members[blob.partition]
        if m.rest is None or blob.mask & who.folded or blob.seq != who.seq:
            raise AssertionError(f"{blob} folded out of order")
        m.rest = plus(m.rest, times(blob.bits, who.weight))
        who.folded |= blob.mask
        who.heads += blob.kind is StreamKind.HEADS
        self._fill(m)

    def recover_other(self, mirror: int, blob: SimBlob) -> None:
        m = self.mirrors[mirror]
        m.other = plus(m.other, blob.bits)
        m.other_mask |= blob.mask
        m.other_heads += blob.kind is StreamKind.HEADS
        self._fill(m)

    def recover_emit(self, mirror: int, kind: StreamKind, table: int, lo: int) -> tuple[SimBlob, int]:
        rest = self.mirrors[mirror].rest
        assert rest is not None
        partition = PartitionId(0xFFFFFFFF)
        if kind is StreamKind.HEADS or table != TABLES[0]:
            return SimBlob(kind, partition, 0), -1
        mask = self._mask(lo)
        blob = SimBlob(kind, partition, 0, 0, None, (rest[0] & mask, rest[1] & mask), mask)
        return blob, lo + self.piece if lo + self.piece < self.samples else -1

    def recover_end(self, mirror: int, abort: bool) -> None:
        m = self.mirrors[mirror]
        early, solved = m.early, self._solved(m) if not abort else {}
        m.rest, m.early = None, False
        if early:
            for partition in m.here:
                if abort:
                    self.fenced.add(partition)
                    self.drop(partition)
                elif self.partitions[partition].absent:
                    raise AssertionError(f"partition {partition} is not whole")
            return
        for partition, page in solved.items():
            self.install(partition, self._rebuilt(m.members[partition], page))

    def _solved(self, m: SimMirror) -> dict[PartitionId, Page]:
        """The lost members, as far as what is left of the rows has them."""
        rest = m.rest
        if rest is None:
            return {}
        if len(m.lost) == 1:
            who = m.members[m.lost[0]]
            return {m.lost[0]: times(rest, 3 - who.weight)}
        i, j = (list(m.members).index(b) for b in m.lost)
        # r0 = x + y, r1 = g**i x + g**j y; g**i + g**j = g**(3 - i - j)
        r0, r1 = (rest, m.other) if not m.row else (m.other, rest)
        x = times(plus(r1, times(r0, j)), i + j)
        return {m.lost[0]: x, m.lost[1]: plus(r0, x)}


__all__ = ["Page", "Partition", "SimBlob", "SimMirror", "SimStore", "plus", "times"]
