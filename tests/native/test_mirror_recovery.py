"""Any one (m = 1) or any two (m = 2) of the k + m are lost, and everything lives on, bit for bit, while it trains."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror_cluster import ID, PIECE, SHARDS, Cluster, dense_pages, mirror_pages, pages_of, split

from everstep.model.table import TableSpec
from everstep.native import BlobKind, Recovering
from everstep.native.blob import parse
from everstep.native.ledger import bitmap
from everstep.testing import mirror_twin, twin
from everstep.testing.mirror_twin import APPLIED, GAP, REPEAT


class Recovery(Cluster):
    """A cluster that loses members. Their stores stay as oracles: what comes back must be what they are."""

    def __init__(self, k: int, m: int, seed: int) -> None:
        super().__init__(k, m, seed)
        self.lost: list[int] = []
        self.homes_of: dict[int, int] = {}  # row of the mirror at whose ps a lost partition is to live
        self.rows: list[int] = []  # mirrors that are left
        self.exchange: dict[int, Iterator[None]] = {}
        self.folds: dict[int, Iterator[None]] = {}

    def lose(self, lost: list[int], rows: list[int], homes: list[int]) -> None:
        """Partitions ``lost`` are gone, mirrors ``rows`` are left; at that of row ``homes[i]`` is ``lost[i]`` to
        live."""
        self.lost, self.rows = lost, rows
        self.homes_of = dict(zip(lost, homes, strict=True))
        for b in lost:
            seqs = {r: {x: s for x, s, _ in self.homes[r].mirror_state(ID)}[b] for r in rows}
            ahead = max(seqs, key=lambda r: seqs[r])
            for r in rows:  # the one that is ahead gives the differences that the other one lacks
                for blob in self.delivered[b, ahead]:
                    self.apply(r, blob)
        for (b, r), blobs in self.links.items():
            if b in lost or r not in rows:
                blobs.clear()
        for r in rows:
            if len(lost) == 2 or r in homes:
                self.homes[r].recover_begin(ID, lost, [b for b in lost if self.homes_of[b] == r])
        self.folds = {b: self.sync(b) for b in range(self.k) if b not in lost}
        if len(lost) == 2:
            self.exchange = {r: self.emit_remainder(r) for r in rows}

    def recovering_rows(self) -> list[int]:
        return [r for r in self.rows if len(self.lost) == 2 or r in self.homes_of.values()]

    def drain(self) -> None:
        for b, store in enumerate(self.ps):
            _, entries, data = store.take_outbox(1 << 30)
            if b in self.lost:
                continue  # an oracle is heard by nobody
            for _, _, _, at, length in entries:
                for r in self.rows if self.rows else range(self.m):
                    self.links[b, r].append(data[at : at + length].tobytes())
        for home in self.homes_of.values():
            _, entries, data = self.homes[home].take_outbox(1 << 30)
            for partition, _, _, at, length in entries:
                assert partition in self.lost
                for r in self.rows:
                    self.links[partition, r].append(data[at : at + length].tobytes())

    def deliver(self, b: int, r: int) -> None:
        blob = self.links[b, r].popleft()
        kind = parse(blob, lambda t: self.ps[0].layout(t)[2]).kind
        if self.lost and kind is not BlobKind.CHANGE:
            if r in self.recovering_rows() and self.homes[r].recover_state(ID) is not None:
                assert self.homes[r].recover_fold(ID, blob) in (APPLIED, REPEAT)
                assert self.homes[r].recover_fold(ID, blob) in (APPLIED, REPEAT)
            return
        self.delivered[b, r].append(blob)
        assert self.apply(r, blob) in (APPLIED, REPEAT)

    def emit_remainder(self, r: int) -> Iterator[None]:
        """From mirror ``r`` to the other one: what is left when the survivors are folded out."""
        home, other = self.homes[r], self.homes[1 - r]
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            for table in home.tables():
                lo = 0
                while lo >= 0:
                    # `hi` in slots; a stretch begins at a page
                    next_lo, data = home.emit_recovering(ID, kind, table, lo, lo + PIECE)
                    if data:
                        assert other.recover_other(ID, data) in (APPLIED, REPEAT)
                        assert other.recover_other(ID, data) == REPEAT
                    assert data or next_lo == lo
                    lo = next_lo
                    yield

    def ask(self, b: int, table: int, slots: np.ndarray) -> None:
        """Rows of a partition that is being recovered, on demand."""
        for survivor in self.folds:
            self.ps[survivor].emit_slots(survivor, table, slots)
        self.deliver_all()
        home = self.homes_of[b]
        if len(self.lost) == 2:
            assert self.homes[home].recover_other(ID, self.homes[1 - home].emit_recovering_slots(ID, table, slots)) in (
                APPLIED,
                REPEAT,
            )

    def push_lost(self, shard: int, lease: int, n: int) -> bool:
        """One more push of the lost partitions: at their new places, and at the oracles. False: not owned yet."""
        if not all(b in self.homes[home].owned() for b, home in self.homes_of.items()):
            return False
        lo = self.positions[shard]
        parts: dict[int, list] = {}
        for b in self.lost:
            parts[b] = []
            for spec in self.specs:
                keys = np.unique(self.rng.integers(-200, 200, n))
                keys = keys[twin.partition_of(keys, spec.id, self.k) == b]
                grads = self.rng.normal(size=(len(keys), spec.dim)).astype(np.float32)
                parts[b].append((spec.id, keys, grads, -1.0))
        for b, home in self.homes_of.items():
            args = (shard, lo, lo + 1, lease, bitmap([b], self.k), parts[b])
            store = self.homes[home]
            for spec, (_, keys, _, _) in zip(self.specs, parts[b], strict=True):
                for table in (spec.id, spec.candidates_id) if spec.admit_after else (spec.id,):
                    slots = store.missing(b, table, keys)
                    if not len(slots):
                        continue
                    with pytest.raises(Recovering):
                        store.push(*args)
                    if table == spec.id:
                        with pytest.raises(Recovering):
                            store.pull(table, keys, np.empty((len(keys), spec.dim), np.float32))
                    self.ask(b, table, slots)
                    assert not len(store.missing(b, table, keys))
            store.protect([b], True)
            assert store.push(*args).applied == self.ps[b].push(*args).applied == 1
            for table, keys, _, _ in parts[b]:
                rows = [np.empty((len(keys), store.dim(table)), np.float32) for _ in range(2)]
                store.pull(table, keys, rows[0])
                self.ps[b].pull(table, keys, rows[1])
                assert rows[0].tobytes() == rows[1].tobytes()
        return True

    def push_one(self, b: int, shard: int, lo: int, lease: int, n: int) -> None:
        parts = []
        for spec in self.specs:
            keys = np.unique(self.rng.integers(-200, 200, n))
            keys = keys[twin.partition_of(keys, spec.id, self.k) == b]
            parts.append((spec.id, keys, self.rng.normal(size=(len(keys), spec.dim)).astype(np.float32), -1.0))
        self.ps[b].push(shard, lo, lo + 1, lease, b"", parts)

    def step(self) -> None:
        """One random thing while it recovers."""
        what = self.rng.integers(0, 10)
        if what < 2 and self.folds:
            b = int(self.rng.choice(list(self.folds)))
            for _ in range(int(self.rng.integers(1, 6))):
                next(self.folds[b], None)
        elif what < 5:
            self.drain()
            waiting = [link for link, blobs in self.links.items() if blobs]
            if waiting:
                link = waiting[self.rng.integers(len(waiting))]
                for _ in range(min(len(self.links[link]), int(self.rng.integers(1, 6)))):
                    self.deliver(*link)
        elif what < 6 and self.exchange:
            for _ in range(int(self.rng.integers(1, 6))):
                next(self.exchange[int(self.rng.integers(2))], None)
        elif what < 8 and self.folds and not self.homes_ready():
            b = int(self.rng.choice(list(self.folds)))
            shard = SHARDS[self.rng.integers(len(SHARDS))]
            # Only this one goes ahead: its own position, known to nobody else.
            at = self.ps[b].watermarks(shard)
            if at is not None:
                self.push_one(b, shard, int(at[1][0]), 3, 20)
        elif what == 9:
            for b in self.folds:
                self.ps[b].expire(b, 0)
        elif what == 8:
            for shard in SHARDS:
                self.push_lost_alone(shard)

    def homes_ready(self) -> bool:
        return all(b in self.homes[home].owned() for b, home in self.homes_of.items())

    def push_lost_alone(self, shard: int) -> None:
        if not self.homes_ready():
            return
        marks = {int(self.ps[b].watermarks(shard)[1][0]) for b in self.lost if self.ps[b].watermarks(shard)}
        if len(marks) == 1:
            self.positions[shard] = marks.pop()
            self.push_lost(shard, 3, 12)

    def follow_on(self, row: int) -> None:
        """After the recovery this mirror still is what it must be, with the lost partitions at their new places."""
        self.deliver_all()
        at = [self.homes[self.homes_of[b]] if b in self.lost else self.ps[b] for b in range(self.k)]
        for b, store in enumerate(at):
            assert self.homes[row].mirror_state(ID)[b] == (b, store.seq(b), True)
        members = [split(pages_of(store, b)) for b, store in enumerate(at)]
        expected = mirror_twin.code([summed for summed, _ in members], row)
        held = mirror_pages(self.homes[row], self.specs)
        assert mirror_twin.trimmed(held) == mirror_twin.trimmed(expected)
        for b in range(self.k):
            assert mirror_twin.trimmed(dense_pages(self.homes[row], b)) == mirror_twin.trimmed(members[b][1])

    def finish(self) -> None:
        for fold in self.folds.values():
            for _ in fold:
                pass
        self.deliver_all()
        for _ in range(10_000):
            live = False
            for exchange in self.exchange.values():
                live |= next(exchange, self) is not self
            if not live:
                break
        for b, home in self.homes_of.items():
            heads, bodies, present, total = self.homes[home].recover_state(ID)[b]
            assert heads and bodies and present == total


def random_life(cluster: Cluster, steps: int) -> None:
    """Pushes and opens, streamed to mirrors that are being built meanwhile, until all are complete."""
    rng = cluster.rng
    for shard in SHARDS:
        cluster.open(shard, 1)
    for _ in range(int(rng.integers(0, 3))):
        cluster.push(SHARDS[0], 1, 30)
    for b, store in enumerate(cluster.ps):
        store.protect([b], True)
        cluster.syncs[b] = cluster.sync(b)
    for _ in range(steps):
        shard = SHARDS[rng.integers(len(SHARDS))]
        match int(rng.integers(0, 6)):
            case 0 | 1:
                cluster.push(shard, 3, int(rng.integers(0, 60)))
            case 2:
                cluster.open(shard, int(rng.integers(1, 4)))
            case 3:
                cluster.expire()
            case 4:
                next(cluster.syncs[int(rng.integers(cluster.k))], None)
            case _:
                cluster.drain()
                for link, blobs in cluster.links.items():
                    for _ in range(min(len(blobs), int(rng.integers(0, 4)))):
                        cluster.deliver(*link)
    cluster.build()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 2), st.integers(0, 25), st.integers(0, 120), st.data())
def test_lost_partitions_come_back(seed: int, k: int, m: int, before: int, during: int, data: st.DataObject) -> None:
    cluster = Recovery(k, m, seed)
    random_life(cluster, before)
    victims = data.draw(st.lists(st.integers(0, k + m - 1), min_size=1, max_size=m, unique=True), "victims")
    lost = [v for v in victims if v < k]
    rows = [r for r in range(m) if k + r not in victims]
    if not lost:
        lost, rows = [0], rows or [0]
    homes = [data.draw(st.sampled_from(rows), f"home of {b}") for b in lost]
    cluster.lose(lost, rows, homes)
    for _ in range(during):
        cluster.step()
    cluster.finish()
    for b, home in cluster.homes_of.items():
        assert cluster.homes[home].digest(b) == cluster.ps[b].digest(b)
        assert mirror_twin.trimmed(pages_of(cluster.homes[home], b)) == mirror_twin.trimmed(pages_of(cluster.ps[b], b))
    for r in cluster.recovering_rows():
        cluster.homes[r].recover_end(ID)
    for r in rows:
        cluster.follow_on(r)


def test_two_mirrors_are_levelled_before_a_partition_comes_back() -> None:
    """One mirror has differences that the other one lacks; some reached neither, and are gone with their ps."""
    cluster = Recovery(3, 2, 5)
    random_life(cluster, 10)
    digests = {cluster.ps[1].seq(1): cluster.ps[1].digest(1)}
    for _ in range(6):
        cluster.push(SHARDS[0], 3, 40)
        digests[cluster.ps[1].seq(1)] = cluster.ps[1].digest(1)
    cluster.drain()
    for b in (0, 2):
        for r in (0, 1):
            while cluster.links[b, r]:
                cluster.deliver(b, r)
    for _ in range(4):
        cluster.deliver(1, 0)
    cluster.deliver(1, 1)
    cluster.lose([1], [0, 1], [1])
    cluster.finish()
    found = cluster.homes[1].seq(1)
    assert cluster.homes[1].digest(1) == digests[found]
    assert found == max(digests) - 2


def test_recovery_refuses_what_makes_no_sense() -> None:
    cluster = Recovery(3, 2, 1)
    home = cluster.homes[0]
    with pytest.raises(ValueError, match="does not have all of partition 0"):
        home.recover_begin(ID, [1])
    random_life(cluster, 5)
    for lost, here in (([], None), ([0, 1, 2], None), ([1, 1], None), ([5], None), ([1], [2])):
        with pytest.raises(ValueError):
            home.recover_begin(ID, lost, here)
    with pytest.raises(ValueError, match="recovers nothing"):
        home.recover_end(ID)
    cluster.lose([1], [0, 1], [0])
    with pytest.raises(ValueError, match="recovers already"):
        home.recover_begin(ID, [1])
    with pytest.raises(ValueError, match="not recovered yet"):
        home.recover_end(ID)
    cluster.ps[0].emit(0, BlobKind.HEADS, cluster.specs[0].id, PIECE, 2 * PIECE)
    _, ((_, _, _, at, length),), data = cluster.ps[0].take_outbox(1 << 20)
    assert home.recover_fold(ID, data[at : at + length]) == GAP
    home.recover_end(ID, abort=True)
    assert home.owned() == []


def test_a_recovery_copies_no_more_than_what_is_between_its_first_and_last_fold() -> None:
    cluster = Recovery(3, 1, 11)
    spec = cluster.specs[0]
    keys = np.arange(40_000)
    for b, store in enumerate(cluster.ps):
        mine = keys[twin.partition_of(keys, spec.id, cluster.k) == b]
        store.put_absent(spec.id, mine, np.ones((len(mine), spec.dim), np.float32))
    random_life(cluster, 0)
    home = cluster.homes[0]
    before = home.mirror_bytes(ID)
    heads = before // 5
    cluster.lose([1], [0], [0])
    assert home.mirror_bytes(ID) < before + heads  # nothing but bookkeeping: two bytes a slot
    most = 0
    folds = list(cluster.folds.values())
    while folds:  # the survivors' sweeps go on side by side
        folds = [fold for fold in folds if next(fold, fold) is not fold]
        cluster.deliver_all()
        most = max(most, home.mirror_bytes(ID))
    cluster.finish()
    assert most < before + heads + before // 4
    assert home.mirror_bytes(ID) < before + heads  # what was copied is given back before the recovery ends
    home.recover_end(ID)
    assert home.mirror_bytes(ID) == before
    assert home.digest(1) == cluster.ps[1].digest(1)


def test_an_aborted_recovery_leaves_nothing_of_the_partition() -> None:
    """Its heads were there, its bodies not: it must not be served, and may come back from elsewhere."""
    cluster = Recovery(2, 1, 3)
    random_life(cluster, 8)
    cluster.lose([1], [0], [0])
    home = cluster.homes[0]
    while not home.recover_state(ID)[1][0]:
        next(cluster.folds[0])
        cluster.deliver_all()
    assert home.owned() == [1] and sum(home.partition_rows(1).values())
    with pytest.raises(Recovering):
        home.digest(1)
    home.recover_end(ID, abort=True)
    assert home.owned() == []
    home.recover_begin(ID, [1])  # the mirror itself is as it was
    for end in (True, False):
        cluster.folds = {0: cluster.sync(0)}
        cluster.finish()
        assert home.digest(1) == cluster.ps[1].digest(1)
        home.recover_end(ID, abort=end)
        assert home.owned() == ([] if end else [1])
        if end:
            home.recover_begin(ID, [1])


def test_a_partition_comes_back_while_threads_read_and_push() -> None:
    """Survivors push and send, contents are folded, and the lost partition is read and pushed to, each in its
    thread."""
    k, lost = 3, 1
    cluster = Recovery(k, 1, 17)
    for shard in SHARDS:
        cluster.open(shard, 1)
    for _ in range(8):
        cluster.push(SHARDS[0], 1, 300, span=2000)
    cluster.build()
    home, oracle, shard = cluster.homes[0], cluster.ps[lost], SHARDS[0]
    home.recover_begin(ID, [lost])
    start = cluster.positions[shard]
    errors: list[BaseException] = []
    folded = [threading.Event() for _ in range(k)]
    folded[lost].set()
    pushed, begun = 60, threading.Event()

    def keys_of(b: int, rng: np.random.Generator, spec: TableSpec) -> np.ndarray:
        keys = np.unique(rng.integers(-2000, 2000, 150))
        return keys[twin.partition_of(keys, spec.id, k) == b]

    def parts_of(b: int, rng: np.random.Generator) -> list[tuple[int, np.ndarray, np.ndarray, float]]:
        out = []
        for spec in cluster.specs:
            keys = keys_of(b, rng, spec)
            out.append((spec.id, keys, rng.normal(size=(len(keys), spec.dim)).astype(np.float32), -1.0))
        return out

    def survive(b: int) -> None:
        rng = np.random.default_rng(b)
        fold = cluster.sync(b)
        for at in range(200):
            assert cluster.ps[b].push(shard, start + at, start + at + 1, 1, b"", parts_of(b, rng)).applied == 1
            next(fold, None)
        for _ in fold:
            pass
        folded[b].set()

    def send(b: int) -> None:
        while not errors:
            done = folded[b].is_set()
            _, entries, data = cluster.ps[b].take_outbox(1 << 15)
            if not entries and done:
                return
            for _, _, kind, at, length in entries:
                blob = data[at : at + length]
                if kind == BlobKind.CHANGE:
                    assert home.mirror_apply(ID, blob) == APPLIED
                else:
                    assert home.recover_fold(ID, blob) in (APPLIED, REPEAT)  # repeat: where it had no rows

    def serve() -> None:
        rng = np.random.default_rng(99)
        at = 0
        while at < pushed:
            if home.owned() != [lost]:
                if errors:
                    return
                continue
            begun.set()
            parts = parts_of(lost, rng)
            while not errors:
                try:
                    assert home.push(shard, start + at, start + at + 1, 1, b"", parts).applied == 1
                    break
                except Recovering:
                    for table, keys, _, _ in parts:
                        home.missing(lost, table, keys)
            assert oracle.push(shard, start + at, start + at + 1, 1, b"", parts).applied == 1
            at += 1

    def read() -> None:
        rng = np.random.default_rng(7)
        while not (begun.is_set() and all(event.is_set() for event in folded)) and not errors:
            for spec in cluster.specs:
                keys = keys_of(lost, rng, spec)
                rows = np.empty((len(keys), spec.dim), np.float32)
                try:
                    home.pull(spec.id, keys, rows)
                    assert np.isfinite(rows).all()
                except (KeyError, Recovering):
                    pass

    def guarded(what: Callable[[], None]) -> None:
        try:
            what()
        except BaseException as error:
            errors.append(error)

    work: list[Callable[[], None]] = [serve, read]
    for b in (0, 2):
        work += [functools.partial(survive, b), functools.partial(send, b)]
    threads = [threading.Thread(target=guarded, args=(what,), daemon=True) for what in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    home.recover_end(ID)
    assert home.digest(lost) == oracle.digest(lost)
