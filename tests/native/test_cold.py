"""Rows on disk: the same bits as in memory, whatever is done with them, and as little memory as was asked for."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from mirror_cluster import ID, pages_of

from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Full, Store, unique_route

PARTITIONS = 4
SPEC = TableSpec("wide", 32, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1), InitSpec(InitKind.UNIFORM, -1.0, 1.0))
ALL = list(range(PARTITIONS))
MIB = 1 << 20


class Rows:
    """A store that gets the same pushes as any other one of the same seed."""

    def __init__(self, cold: Path | None = None, limit: int = 0) -> None:
        self.store = Store(PARTITIONS, 3)
        if cold is not None:
            self.store.begin_cold(cold)
        self.store.own(ALL)
        self.store.declare(SPEC)
        self.store.open(5, 0, 1)
        self.store.set_limit(limit)
        self.rng, self.at = np.random.default_rng(1), 0

    def push(self, keys: np.ndarray) -> None:
        everywhere = np.arange(PARTITIONS, dtype=np.int32)
        routed = np.asarray(unique_route(np.unique(keys), PARTITIONS, SPEC.id, everywhere, PARTITIONS)[0]).copy()
        out = np.empty((len(routed), SPEC.dim), np.float32)
        self.store.pull(SPEC.id, routed, out)
        grads = self.rng.standard_normal(out.shape, np.float32) + out
        assert self.store.push(5, self.at, self.at + 1, 1, b"", [(SPEC.id, routed, grads, -1.0)], False, 0).applied
        self.at += 1

    def fill(self, rows: int = 20_000) -> None:
        for begin in range(0, rows, 2000):
            self.push(np.arange(begin, begin + 2000))

    def train(self, steps: int, hot: int = 300) -> None:
        """Push hot keys, and some that nobody has asked for in a while."""
        for _ in range(steps):
            self.push(np.r_[self.rng.integers(0, hot, 200), self.rng.integers(0, 20_000, 5)])

    def digests(self) -> list[bytes]:
        return [self.store.digest(b) for b in ALL]


def test_rows_on_disk_have_the_same_bits_and_take_no_memory(tmp_path: Path) -> None:
    plain, cold = Rows(), Rows(tmp_path)
    for rows in (plain, cold):
        rows.fill()
    whole = cold.store.used_bytes()
    assert whole > 5 * MIB
    for _ in range(10):
        plain.train(10)
        cold.train(10)
        cold.store.grow_older()
        cold.store.cool(2 * MIB)
        assert cold.store.used_bytes() <= 2 * MIB
    counts = cold.store.cold_counts()
    assert counts.disk_bytes > 3 * MIB and counts.error == 0 and not list(tmp_path.iterdir())
    assert 0 < counts.misses < 0.1 * counts.lookups  # the hot ones stay
    assert cold.digests() == plain.digests()
    for b in ALL:
        one, other = pages_of(plain.store, b), pages_of(cold.store, b)
        assert one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)
    assert cold.store.used_bytes() <= 2 * MIB  # reading all of it brought nothing back
    assert cold.digests() == plain.digests()


def test_a_mirror_on_disk_becomes_the_same_partition(tmp_path: Path) -> None:
    """Owner and mirror both have rows on disk."""
    owner, holder = Rows(tmp_path), Store(PARTITIONS, 3)
    holder.begin_cold(tmp_path)
    holder.declare(SPEC)
    holder.mirror_make(ID, [0])
    owner.store.protect([0], True)
    for kind in (2, 3):
        owner.store.emit(0, kind, SPEC.id, 0, 1 << 30)
    owner.store.emit_marks(0)
    for step in range(20):
        owner.fill(2000) if step == 0 else owner.train(20)
        if step % 5 == 1:
            owner.fill()
        _, entries, data = owner.store.take_outbox(1 << 30)
        for *_, at, size in entries:
            holder.mirror_apply(ID, bytes(data[at : at + size]))
        for store in (owner.store, holder):
            store.grow_older()
            store.cool(MIB)
        assert holder.used_bytes() <= MIB
    assert holder.cold_counts().disk_bytes > 0
    wanted = owner.store.digest(0)
    holder.promote(ID, 0)
    assert holder.digest(0) == wanted


def test_pushes_while_rows_go_to_disk(tmp_path: Path) -> None:
    plain, cold = Rows(), Rows(tmp_path)
    for rows in (plain, cold):
        rows.fill()
    over = threading.Event()

    def cool() -> None:
        while not over.is_set():
            cold.store.cool(0)  # also what is in use

    thread = threading.Thread(target=cool)
    thread.start()
    try:
        cold.train(150)
    finally:
        over.set()
        thread.join()
    plain.train(150)
    assert cold.store.cold_counts().misses > 0
    assert cold.digests() == plain.digests()


def test_rows_that_do_not_fit_into_the_limit_go_to_disk_instead_of_being_refused(tmp_path: Path) -> None:
    with pytest.raises(Full):
        Rows(limit=3 * MIB).fill()
    plain, cold = Rows(), Rows(tmp_path, limit=3 * MIB)
    for rows in (plain, cold):
        rows.fill()
        rows.train(20)
    assert cold.store.used_bytes() < 4 * MIB
    assert cold.digests() == plain.digests()


def test_a_full_disk_leaves_rows_in_memory(tmp_path: Path) -> None:
    plain, cold = Rows(), Rows(tmp_path)
    for rows in (plain, cold):
        rows.fill()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        cold.store.cool(MIB)
        assert cold.store.cold_counts().error != 0
        cold.train(5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    plain.train(5)
    assert cold.digests() == plain.digests()
    cold.store.cool(MIB)
    assert cold.store.cold_counts().error == 0 and cold.store.used_bytes() <= MIB
    assert cold.digests() == plain.digests()


def test_a_partition_that_goes_gives_its_place_on_disk_back(tmp_path: Path) -> None:
    plain, cold = Rows(), Rows(tmp_path)
    cold.fill()
    cold.store.cool(MIB)
    for b in ALL:
        cold.store.drop(b)
    assert cold.store.cold_counts().disk_bytes == 0 and cold.store.used_bytes() < MIB
    again = Rows(tmp_path)
    again.store = cold.store
    again.store.own(ALL)
    again.store.open(5, 0, 1)
    for rows in (plain, again):
        rows.fill()
    assert again.digests() == plain.digests()


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        Store(1, 0).begin_cold(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        Store(1, 0).begin_cold(tmp_path / "file")
