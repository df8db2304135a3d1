"""Loads partitions from a checkpoint into a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from everstep.errors import CheckpointError
from everstep.model.snapshot import Manifest, PartitionSnapshot
from everstep.model.table import TableSpec, difference
from everstep.native import Store
from everstep.protect.manifest import assemble
from everstep.protect.snapshots import read_marks
from everstep.storage.places import StoragePlace, open_place


class LoadingStore(Protocol):
    """Is what is needed of ``everstep.native.Store``."""

    @property
    def n_partitions(self) -> int: ...
    def declare(self, spec: TableSpec) -> bool: ...
    def specs(self) -> list[TableSpec]: ...
    def layout(self, table: int) -> tuple[int, int, int]: ...
    def page_bytes(self, table: int) -> int: ...
    def load_begin(self, partition: int) -> None: ...
    def load_pages(self, partition: int, table: int, page_nos: list[int], pages: NDArray[np.uint8]) -> None: ...
    def load_end(self, partition: int, marks: bytes) -> None: ...
    def drop(self, partition: int) -> None: ...


def check_tables(saved: Iterable[TableSpec], now: Iterable[TableSpec], where: str) -> None:
    """Raise CheckpointError, naming table, field and both values, if a table of ``now`` was another one in the
    checkpoint."""
    was = {spec.name: spec for spec in saved}
    for spec in now:
        before = was.get(spec.name)
        if before is not None and before != spec:
            raise CheckpointError(
                f"{where}: table {spec.name!r} {difference(before, spec, 'in the checkpoint', 'here')}"
            )


def load_partition(store: LoadingStore, place: StoragePlace | str, snapshot: PartitionSnapshot) -> None:
    """Load the partition as it was when the snapshot was taken: owned by ``store`` on return, its tables declared.

    Raises CheckpointError (a file is missing, cut or changed, a table is another one here), StorageError (cannot be
    read); the partition is empty and not owned then.
    """
    place = open_place(place) if isinstance(place, str) else place
    where = f"{place.url}, partition {snapshot.partition}"
    whole = assemble(place, snapshot)
    head = whole.head
    if head.partitions != store.n_partitions:
        raise CheckpointError(f"{where}: of a job with {head.partitions} partitions, this one has {store.n_partitions}")
    check_tables(head.tables, store.specs(), where)
    try:
        read = read_marks(whole.marks)
        if (read.seq, read.fingerprint, read.watermarks) != (
            snapshot.seq,
            snapshot.fingerprint,
            snapshot.watermarks,
        ):
            raise ValueError("its marks are not those that the manifest says")
        for spec in head.tables:
            store.declare(spec)
        for table, layout in whole.layouts.items():
            here = (*store.layout(table), store.page_bytes(table))
            if tuple(layout) != here:
                raise ValueError(f"pages of table {table} are {tuple(layout)}, here {here}")
        store.load_begin(snapshot.partition)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    try:
        for table in whole.pages:
            for pages in whole.some(table):
                store.load_pages(snapshot.partition, table, pages.numbers, pages.data.reshape(-1))
        store.load_end(snapshot.partition, whole.marks)
    except (ValueError, KeyError) as error:
        store.drop(snapshot.partition)
        raise CheckpointError(f"{where}: {error}") from error
    except MemoryError:
        store.drop(snapshot.partition)
        raise CheckpointError(f"{where}: there is no memory for it here") from None
    except BaseException:
        store.drop(snapshot.partition)
        raise


def unloadable(place: StoragePlace, manifest: Manifest) -> Iterator[str]:
    """Yield what a ps would refuse of a checkpoint whose every byte is right, a line for each partition. One partition
    is in memory at a time. Raises StorageError: the place cannot be read."""
    try:
        store = Store(manifest.partitions, manifest.seed)
        for spec in manifest.tables:
            store.declare(spec)
    except ValueError as error:
        yield f"checkpoint {manifest.checkpoint} of {place.url}: {error}"
        return
    for snapshot in manifest.snapshots:
        try:
            load_partition(store, place, snapshot)
        except CheckpointError as error:
            yield str(error)
        else:
            store.drop(snapshot.partition)
