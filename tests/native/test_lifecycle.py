"""Rows that are admitted late, expire, or make room for others; as stories. ``test_twin`` has the random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Full, Store, bitmap, check_spec, unique_route
from everstep.native.blob import BlobKind, parse
from everstep.testing.twin import TwinStore, partition_of

SGD = OptimizerSpec(OptimizerKind.SGD, 1.0)
UNIFORM = InitSpec(InitKind.UNIFORM, -1.0, 1.0)


class Place:
    """A store and its twin with one partition; every push of a key has the gradient 1."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.stores: list[Any] = [Store(1, 3), TwinStore(1, 3)]
        self.at = 0
        for s in self.stores:
            s.own([0])
            s.declare(spec)
            s.open(5, 0, 1)
            s.protect([0], True)

    def push(self, *keys: int, now_s: int = 0) -> None:
        part = (self.spec.id, np.array(keys, np.int64), np.ones((len(keys), self.spec.dim), np.float32), -1.0)
        for s in self.stores:
            assert s.push(5, self.at, self.at + 1, 1, b"", [part], False, now_s).applied == 1
        self.at += 1
        self.agree()

    def expire(self, now_s: int = 0) -> int:
        freed = [s.expire(0, now_s) for s in self.stores]
        assert freed[0] == freed[1] == (freed[0][0], True)
        self.agree()
        return freed[0][0]

    def agree(self) -> None:
        store, oracle = self.stores
        assert store.digest(0) == oracle.digest(0)
        assert store.used_bytes() == oracle.used_bytes()

    def values(self, key: int) -> float:
        """Of the first column, as pushes of 1 have moved it from where it began."""
        now, first = (np.empty((1, self.spec.dim), np.float32) for _ in range(2))
        self.stores[0].pull(self.spec.id, np.array([key]), now)
        fresh = Store(1, 3)
        fresh.own([0])
        fresh.declare(self.spec)
        fresh.pull(self.spec.id, np.array([key]), first)
        return float(np.round(first[0, 0] - now[0, 0], 4))

    def rows(self) -> dict[int, int]:
        rows: dict[int, int] = self.stores[0].partition_rows(0)
        return rows


def test_a_key_is_trained_after_so_many_sightings() -> None:
    place = Place(TableSpec("t", 8, SGD, UNIFORM, admit_after=2))
    place.push(1, 2)
    place.push(1)
    assert place.values(1) == 0
    assert place.rows() == {place.spec.id: 0, place.spec.candidates_id: 2}
    place.push(1, 2)
    assert (place.values(1), place.values(2)) == (1, 0)
    assert place.rows() == {place.spec.id: 1, place.spec.candidates_id: 1}
    place.push(1, 2)
    assert (place.values(1), place.values(2)) == (2, 1)
    assert place.rows() == {place.spec.id: 2, place.spec.candidates_id: 0}
    assert place.stores[0].stats().rows == {"t": 2}


def test_a_row_that_nobody_pushes_expires_and_begins_anew() -> None:
    place = Place(TableSpec("t", 8, SGD, UNIFORM, expire_batches=3))
    place.push(1, 2)
    place.push(1)
    place.push(1)
    assert place.expire() == 0
    place.push(1)
    assert place.expire() == 1
    assert (place.values(1), place.values(2)) == (4, 0)
    place.push(2)
    assert place.values(2) == 1


def test_time_expires_rows_and_candidates() -> None:
    place = Place(TableSpec("t", 8, SGD, UNIFORM, admit_after=1, expire_s=60))
    place.push(1, 2, now_s=1000)
    place.push(1, now_s=1030)
    assert place.expire(1059) == 0
    assert place.expire(1060) == 1  # the candidate 2
    assert place.expire(1089) == 0
    assert place.expire(1090) == 1
    assert set(place.rows().values()) == {0}
    place.push(1, now_s=1100)
    assert place.values(1) == 0  # it has to be admitted again


def test_expiry_goes_on_in_bounded_steps() -> None:
    place = Place(TableSpec("t", 8, SGD, UNIFORM, expire_batches=1))
    place.push(*range(500))
    for _ in range(2):
        place.push(1000)
    for s in place.stores:
        freed, steps = 0, 0
        done = False
        while not done:
            n, done = s.expire(0, 0, 100)
            assert n <= 100
            freed += n
            steps += 1
        assert freed == 500 and steps > 5
    place.agree()


def test_over_the_ceiling_a_push_is_refused_before_anything_changes() -> None:
    place = Place(TableSpec("t", 64, SGD, UNIFORM))
    place.push(*range(100))
    for s in place.stores:
        s.set_limit(s.used_bytes() + 20_000, "error")
        before = s.digest(0)
        keys = np.arange(5000)
        part = (place.spec.id, keys, np.ones((5000, 64), np.float32), -1.0)
        with pytest.raises(Full):
            s.push(5, place.at, place.at + 1, 1, b"", [part])
        with pytest.raises(Full):
            s.put_absent(place.spec.id, keys, part[2])
        assert s.digest(0) == before
    place.push(*range(100))
    with pytest.raises(Full, match=r"cannot grow: \d+ bytes are in use, the ceiling is \d+: raise it"):
        place.push(*range(5000))


def test_over_the_ceiling_the_least_recently_pushed_make_room() -> None:
    place = Place(TableSpec("t", 64, SGD, UNIFORM, expire_batches=1_000_000))
    place.push(*range(1000))
    place.push(*range(500))
    ceiling = place.stores[0].used_bytes() + 10_000
    for s in place.stores:
        s.set_limit(ceiling, "evict")
    for lo in range(1000, 1400, 100):
        place.push(*range(lo, lo + 100))
    assert place.stores[0].used_bytes() <= ceiling
    assert {place.values(key) for key in range(500)} == {2}
    gone = sum(place.values(key) == 0 for key in range(500, 1000))
    assert 300 <= gone < 500
    with pytest.raises(Full):
        place.push(*range(10_000, 20_000))


def test_freed_rows_leave_zeros_and_give_their_memory_back() -> None:
    place = Place(TableSpec("t", 64, SGD, UNIFORM, expire_batches=1))
    store = place.stores[0]
    place.push(*range(1000))
    full = store.used_bytes()
    place.push(0, 1)
    place.push(0, 1)
    assert place.expire() == 998
    assert store.used_bytes() < full / 3
    _, marks = store.snapshot_begin(0, -1)
    names, pages = store.snapshot_next(0, 1 << 20)
    store.snapshot_end(0)
    assert names == [(place.spec.id, 0)]
    other = Store(1, 3)
    other.declare(place.spec)
    other.load_begin(0)
    other.load_pages(0, place.spec.id, [0], pages)
    other.load_end(0, marks)
    assert other.digest(0) == store.digest(0)


def test_an_increment_says_that_a_page_lost_its_rows() -> None:
    place = Place(TableSpec("t", 64, SGD, UNIFORM, expire_batches=1))
    store = place.stores[0]
    place.push(*range(300))
    generation, _ = store.snapshot_begin(0, -1)
    base = dict(pages_of(store))
    store.snapshot_end(0)
    for _ in range(2):
        place.push(0)
    place.expire()
    _, marks = store.snapshot_begin(0, generation)
    late = (place.spec.id, np.arange(50), np.ones((50, 64), np.float32), -1.0)
    store.push(5, place.at, place.at + 1, 1, b"", [late])  # what comes after is in no snapshot
    for name, page in pages_of(store):
        base[name] = page
    store.snapshot_end(0)
    other = Store(1, 3)
    other.declare(place.spec)
    other.load_begin(0)
    for (table, no), page in base.items():
        other.load_pages(0, table, [no], page)
    other.load_end(0, marks)
    assert other.partition_rows(0) == {place.spec.id: 1}
    assert parse(marks).marks.clock == 3


def pages_of(store: Store) -> list[tuple[tuple[int, int], np.ndarray]]:
    names, data = store.snapshot_next(0, 1 << 30)
    at, out = 0, []
    for table, no in names:
        out.append(((table, no), data[at : at + store.page_bytes(table)].copy()))
        at += store.page_bytes(table)
    return out


def test_what_is_freed_is_a_difference_too() -> None:
    place = Place(TableSpec("t", 4, SGD, UNIFORM, admit_after=1, expire_batches=1))
    store, oracle = place.stores
    place.push(1, 2, 3)
    place.push(1, 2)
    place.push(1)
    place.expire()
    _, entries, data = store.take_outbox(1 << 20)
    blobs = [data[at : at + n].tobytes() for *_, at, n in entries]
    assert blobs == oracle.take()
    spec = place.spec
    widths = {spec.id: 4 * (4 + 2), spec.candidates_id: 12}
    last = parse(blobs[-1], widths.__getitem__)
    assert last.kind is BlobKind.CHANGE
    assert [int(p.keys.sum()) for p in last.parts if p.keys is not None] == [3]  # the candidate; 2's row went before


@pytest.mark.parametrize("life", [{"admit_after": -1}, {"expire_s": 1 << 31}, {"dense": True, "expire_batches": 3}])
def test_a_life_cycle_that_cannot_be(life: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="table 't'"):
        check_spec(TableSpec("t", 4, SGD, **life))


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_mirror_has_it_all_and_the_recovered_partition_goes_on_as_the_lost_one(members: int, seed: int) -> None:
    spec = TableSpec("t", 5, OptimizerSpec(OptimizerKind.ADAM, 0.1), UNIFORM, admit_after=2, expire_batches=6)
    rng = np.random.default_rng(seed)
    owners, home = [Store(2, 3) for _ in range(members)], Store(2, 3)
    for store in (*owners, home):
        store.declare(spec)
        store.set_limit(60_000, "evict")
    home.set_limit(0)
    home.mirror_make(1, list(range(members)), 0)
    stores: list[tuple[int, Store]] = list(enumerate(owners))
    for b, store in stores:
        store.own([b])
        store.open(5, 0, 1)
        store.protect([b], True)

    def step(at: int, where: list[tuple[int, Store]]) -> None:
        keys = unique_route(rng.zipf(1.3, 300) % 3000, 2, spec.id, np.zeros(2, np.int32))[0]
        grads = rng.normal(size=(len(keys), 5)).astype(np.float32)
        for b, store in where:
            mine = partition_of(keys, spec.id, 2) == b
            part = (spec.id, keys[mine], grads[mine], -1.0)
            assert store.push(5, at, at + 1, 1, bitmap([b], 2), [part]).applied == 1
            store.expire(b, 0, 50)

    def contents(b: int, store: Store) -> None:
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            for table in store.tables():
                lo = 0
                while lo >= 0:
                    lo = store.emit(b, kind, table, lo, lo + 64)
        store.emit_marks(b)

    def deliver(store: Store, fold: bool = False) -> None:
        while store.wait_outbox(0):
            _, entries, data = store.take_outbox(1 << 20)
            for _, _, kind, at, n in entries:
                apply = home.recover_fold if fold and kind != BlobKind.CHANGE else home.mirror_apply
                assert apply(1, data[at : at + n]) == 0

    for at in range(20):
        step(at, stores)
    for b, store in stores:
        contents(b, store)
    for at in range(20, 60):
        step(at, stores)
        for _, store in stores:
            deliver(store)
    while not owners[0].expire(0, 0)[1]:
        pass  # until where the other one will begin
    deliver(owners[0])
    home.recover_begin(1, [0])
    for b, store in stores[1:]:
        contents(b, store)
        deliver(store, fold=True)
    assert home.digest(0) == owners[0].digest(0)
    assert min(owners[0].partition_rows(0).values()) > 0
    home.recover_end(1)
    owners[0].set_limit(0)
    for at in range(60, 70):
        step(at, [(0, owners[0]), (0, home)])
    assert home.digest(0) == owners[0].digest(0)
