"""Small stores and whole checkpoints of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from everstep.ids import PartitionId
from everstep.model.snapshot import Manifest
from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, unique_route
from everstep.protect.manifest import write_manifest
from everstep.protect.snapshots import SnapshotWriter
from everstep.storage.places import open_place

PARTITIONS = 4
SEED = 7
ROWS_OF_A_BATCH = 300  # at most, of each table
ITEMS = TableSpec("items", 4, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1), InitSpec(InitKind.UNIFORM, -1.0, 1.0))
USERS = TableSpec("users", 16, OptimizerSpec(OptimizerKind.ADAM, 0.01))
RANKS = np.zeros(PARTITIONS, np.int32)


def empty_store() -> Store:
    return Store(PARTITIONS, SEED)


def new_store() -> Store:
    """Owns all partitions; shard 3 is open."""
    store = empty_store()
    store.own(range(PARTITIONS))
    for spec in (ITEMS, USERS):
        store.declare(spec)
    store.open(3, 0, 1)
    return store


def train(store: Store, lo: int, hi: int, keys: int = 2000, seed: int = 0) -> None:
    """Batches [lo, hi) of shard 3, one position each, with random keys below ``keys``."""
    for at in range(lo, hi):
        rng = np.random.default_rng((seed, at))
        parts = []
        for spec in (ITEMS, USERS):
            ids, _, _ = unique_route(rng.integers(0, keys, ROWS_OF_A_BATCH), PARTITIONS, spec.id, RANKS)
            grads = rng.normal(size=(len(ids), spec.dim)).astype(np.float32)
            parts.append((int(spec.id), ids, grads, -1.0))
        result = store.push(3, at, at + 1, 1, b"", parts)
        assert result.applied, result


def digests(store: Store) -> list[bytes]:
    return [store.digest(b) for b in range(PARTITIONS)]


def checkpoint(writer: SnapshotWriter, where: Path | str, number: int, since: int = 0, at: float = 0.0) -> Manifest:
    """All partitions, and the manifest."""
    answer = writer.write(number, since, str(where), [PartitionId(b) for b in range(PARTITIONS)])
    assert not answer.error, answer.error
    manifest = Manifest(
        job="toy",
        checkpoint=number,
        at=at,
        since=since,
        seed=SEED,
        partitions=PARTITIONS,
        tables=answer.tables,
        snapshots=answer.snapshots,
    )
    write_manifest(open_place(where), manifest)
    return manifest


def writer_of(store: Store, **options: float) -> SnapshotWriter:
    return SnapshotWriter(store, Path(), job="toy", **options)
