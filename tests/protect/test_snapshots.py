"""Snapshots: what was written is what is loaded, bit for bit, whatever was going on meanwhile."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from snapshot_stores import (
    ITEMS,
    PARTITIONS,
    RANKS,
    ROWS_OF_A_BATCH,
    USERS,
    checkpoint,
    digests,
    empty_store,
    new_store,
    train,
    writer_of,
)

from everstep.brain.events import SnapshotsWritten
from everstep.errors import CheckpointError
from everstep.ids import PartitionId
from everstep.model.snapshot import Manifest
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, unique_route
from everstep.protect.export import table_rows
from everstep.protect.manifest import compact, latest_intact
from everstep.protect.restore import load_partition
from everstep.storage.places import open_place


def restored(where: Path, manifest: Manifest) -> Store:
    store = empty_store()
    for snapshot in manifest.snapshots:
        load_partition(store, str(where), snapshot)
    return store


def test_a_base_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 5)
    manifest = checkpoint(writer_of(store), tmp_path, 1)
    again = restored(tmp_path, manifest)
    assert digests(again) == digests(store)
    assert sorted(again.owned()) == list(range(PARTITIONS))
    assert {w for snapshot in manifest.snapshots for w in snapshot.watermarks} == {(3, 5)}
    assert sum(snapshot.rows for snapshot in manifest.snapshots) == sum(store.stats().rows.values())
    train(store, 5, 8)
    train(again, 5, 8)
    assert digests(again) == digests(store), "it goes on as the first one"


def test_increments_hold_what_changed_since_the_one_before(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 20, keys=50_000)
    writer = writer_of(store)
    base = checkpoint(writer, tmp_path, 1)
    at_base = digests(store)
    train(store, 20, 21, keys=200)
    delta = checkpoint(writer, tmp_path, 2, since=1)
    at_delta = digests(store)
    train(store, 21, 25)
    assert [len(i.files) for i in delta.snapshots] == [2] * PARTITIONS
    assert sum(i.bytes_written for i in delta.snapshots) < sum(i.bytes_written for i in base.snapshots) / 2
    assert digests(restored(tmp_path, base)) == at_base
    assert digests(restored(tmp_path, delta)) == at_delta


def test_an_increment_has_rows_not_pages_where_few_changed(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 60, keys=20_000)
    writer = writer_of(store)
    checkpoint(writer, tmp_path, 1)
    train(store, 60, 61, keys=20_000)  # a few rows in every page
    delta = checkpoint(writer, tmp_path, 2, since=1)
    rows = ROWS_OF_A_BATCH * (8 + ITEMS.dim * 8) + ROWS_OF_A_BATCH * (8 + USERS.dim * 12 + 4)
    assert sum(i.bytes_written for i in delta.snapshots) < rows + 2000 * PARTITIONS
    assert digests(restored(tmp_path, delta)) == digests(store)
    train(store, 61, 62, keys=20_000)
    again = checkpoint(writer, tmp_path, 3, since=1)  # not the snapshot before this one: whole pages
    assert sum(i.bytes_written for i in again.snapshots) > 3 * sum(i.bytes_written for i in delta.snapshots)
    assert digests(restored(tmp_path, again)) == digests(store)


def test_random_histories_of_increments(tmp_path: Path) -> None:
    """Which checkpoint builds on which, and how much changed between, is random; each loads as it was."""
    rng = random.Random(4)
    store = new_store()
    writer = writer_of(store)
    at = {}
    for n in range(1, 25):
        train(store, n - 1, n, keys=rng.choice([20, 300, 5000, 20_000]))
        since = rng.choice([0, *sorted(at)[-3:]])
        manifest = checkpoint(writer, tmp_path, n, since=since)
        at[n] = manifest, digests(store)
    for manifest, was in at.values():
        assert digests(restored(tmp_path, manifest)) == was, manifest.checkpoint


def test_an_increment_on_what_this_ps_did_not_write_is_a_base(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 3)
    first = writer_of(store)
    checkpoint(first, tmp_path, 1)
    train(store, 3, 4)
    manifest = checkpoint(writer_of(store), tmp_path, 2, since=1)
    assert [len(i.files) for i in manifest.snapshots] == [1] * PARTITIONS
    first.forget(2)
    manifest = checkpoint(first, tmp_path, 3, since=1)
    assert [len(i.files) for i in manifest.snapshots] == [2, 2, 1, 2]
    assert digests(restored(tmp_path, manifest)) == digests(store)


def test_two_increments_on_the_same_one(tmp_path: Path) -> None:
    """The first was given up by the master, so the next one builds on the same committed checkpoint."""
    store = new_store()
    writer = writer_of(store)
    train(store, 0, 3)
    checkpoint(writer, tmp_path, 1)
    train(store, 3, 4, keys=100)
    checkpoint(writer, tmp_path, 2, since=1)
    train(store, 4, 5, keys=150)
    manifest = checkpoint(writer, tmp_path, 3, since=1)
    assert digests(restored(tmp_path, manifest)) == digests(store)


def test_a_partition_that_is_not_here_is_left_out(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 2)
    store.drop(1)
    answer = writer_of(store).write(1, 0, str(tmp_path), list(range(PARTITIONS)))
    assert [i.partition for i in answer.snapshots] == [0, 2, 3] and not answer.error


def test_snapshots_under_training_are_of_one_moment(tmp_path: Path) -> None:
    """While pushes go on, each snapshot equals what a twin has after exactly as many pushes as the snapshot's mark
    says."""
    store = new_store()
    train(store, 0, 10)
    writer = writer_of(store)
    over = threading.Event()
    error: list[BaseException] = []
    at = 10

    def push() -> None:
        nonlocal at
        try:
            while not over.is_set():
                train(store, at, at + 1)
                at += 1
        except BaseException as e:
            error.append(e)

    thread = threading.Thread(target=push)
    thread.start()
    manifests = [checkpoint(writer, tmp_path, n, since=n - 1) for n in range(1, 6)]
    over.set()
    thread.join(30)
    assert not error
    for manifest in (manifests[0], manifests[-1]):
        again = restored(tmp_path, manifest)
        twin = new_store()
        done = 0
        for snapshot in sorted(manifest.snapshots, key=lambda i: i.watermarks[0][1]):
            upto = snapshot.watermarks[0][1]
            train(twin, done, upto)
            done = upto
            assert again.digest(snapshot.partition) == twin.digest(snapshot.partition), (
                f"partition {snapshot.partition} at {upto}"
            )


def test_take_works_in_its_own_thread_and_newer_orders_win(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 5)
    writer = writer_of(store, bytes_per_s=20_000.0)  # so slow that the first is still being written
    answers: list[SnapshotsWritten] = []
    done = threading.Event()

    def on_done(answer: SnapshotsWritten) -> None:
        answers.append(answer)
        done.set()

    everything = list(range(PARTITIONS))
    writer.take(1, 0, str(tmp_path), everything, on_done)
    writer.take(1, 0, str(tmp_path), everything, on_done)
    writer._bytes_per_s = 0.0
    writer.take(2, 0, str(tmp_path), everything, on_done)
    writer.take(1, 0, str(tmp_path), everything, on_done)
    assert done.wait(30)
    writer.close()
    assert [(a.checkpoint, len(a.snapshots), a.error) for a in answers] == [(2, PARTITIONS, "")]
    assert not list(tmp_path.rglob("*.tmp")), "what was given up is gone"


def test_the_same_checkpoint_again_is_not_written_again(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 3)
    writer = writer_of(store)
    first = writer.write(1, 0, str(tmp_path), [0, 1])
    train(store, 3, 4)
    second = writer.write(1, 0, str(tmp_path), [0, 1, 2])
    assert second.snapshots[:2] == first.snapshots and len(second.snapshots) == 3


def test_compaction_gives_the_same_rows_from_one_file(tmp_path: Path) -> None:
    store = new_store()
    writer = writer_of(store)
    for n in range(1, 5):
        train(store, n - 1, n)
        manifest = checkpoint(writer, tmp_path, n, since=n - 1)
    assert len(manifest.snapshots[0].files) == 4
    merged = compact(open_place(tmp_path), manifest)
    assert [len(i.files) for i in merged.snapshots] == [1] * PARTITIONS
    assert latest_intact(open_place(tmp_path)) == merged
    assert digests(restored(tmp_path, merged)) == digests(store)


def test_another_table_in_the_script_is_one_line(tmp_path: Path) -> None:
    store = new_store()
    train(store, 0, 1)
    manifest = checkpoint(writer_of(store), tmp_path, 1)
    other = empty_store()
    other.declare(msgspec.structs.replace(ITEMS, dim=8))
    with pytest.raises(CheckpointError, match=r"table 'items' dim is 4 in the checkpoint, 8 here"):
        load_partition(other, str(tmp_path), manifest.snapshots[0])
    other = empty_store()
    other.declare(msgspec.structs.replace(ITEMS, optimizer=msgspec.structs.replace(ITEMS.optimizer, lr=0.2)))
    with pytest.raises(CheckpointError, match=r"optimizer.lr is 0.1 in the checkpoint, 0.2 here"):
        load_partition(other, str(tmp_path), manifest.snapshots[0])
    assert other.owned() == []


def test_a_file_that_turns_out_bad_leaves_the_partition_empty_and_another_can_be_loaded(tmp_path: Path) -> None:
    store = new_store()
    writer = writer_of(store)
    train(store, 0, 3)
    good = checkpoint(writer, tmp_path, 1)
    at_good = store.digest(0)
    train(store, 3, 4)
    bad = checkpoint(writer, tmp_path, 2, since=1)
    path = tmp_path / bad.snapshots[0].files[1].path
    path.write_bytes(path.read_bytes()[:-3])
    again = empty_store()
    with pytest.raises(CheckpointError, match="was cut"):
        load_partition(again, str(tmp_path), bad.snapshots[0])
    assert again.owned() == []
    load_partition(again, str(tmp_path), good.snapshots[0])
    assert again.digest(0) == at_good


def test_rows_that_came_late_and_rows_that_went(tmp_path: Path) -> None:
    """A table with a life cycle: its candidates are in the snapshot too; an increment takes back what has gone."""
    spec = TableSpec("late", 4, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1), admit_after=1, expire_batches=6)
    store = empty_store()
    store.own(range(PARTITIONS))
    store.declare(spec)
    store.open(3, 0, 1)

    def push(lo: int, hi: int, at: int) -> None:
        keys, _, _ = unique_route(np.arange(lo, hi), PARTITIONS, spec.id, RANKS)
        grads = np.ones((len(keys), spec.dim), np.float32)
        assert store.push(3, at, at + 1, 1, b"", [(int(spec.id), keys, grads, -1.0)]).applied

    for at in range(4):
        push(0, 3000, at)
    push(3000, 3500, 4)  # sightings only
    writer = writer_of(store)
    base = checkpoint(writer, tmp_path, 1)
    at_base = digests(store)
    assert sum(i.rows for i in base.snapshots) == 3000
    for at in range(5, 15):
        push(10_000, 10_040, at)
    freed = 0
    for partition in range(PARTITIONS):
        over = False
        while not over:
            n, over = store.expire(partition, 0)
            freed += n
    assert freed >= 3000
    delta = checkpoint(writer, tmp_path, 2, since=1)
    assert sum(i.rows for i in delta.snapshots) == 40
    assert digests(restored(tmp_path, base)) == at_base
    again = restored(tmp_path, delta)
    assert digests(again) == digests(store)
    merged = compact(open_place(tmp_path), delta)
    assert digests(restored(tmp_path, merged)) == digests(store)
    (rows,) = [np.sort(np.concatenate([r.keys for r in table_rows(open_place(tmp_path), merged, spec)]))]
    assert rows.tolist() == list(range(10_000, 10_040))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        store = new_store()
        train(store, 0, 2, keys=300)
        writer = writer_of(store)
        checkpoint(writer, tmp_path, 1)
        at_first = digests(store)
        train(store, 2, 40, keys=20_000)
        answer = writer.write(2, 1, str(tmp_path), [PartitionId(b) for b in range(PARTITIONS)])
        assert answer.error.endswith("No space left on device") and not answer.snapshots
        assert not list(tmp_path.rglob(".*.tmp"))
        manifest = latest_intact(open_place(tmp_path))
        assert manifest.checkpoint == 1
        assert digests(restored(tmp_path, manifest)) == at_first
        train(store, 40, 41)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
