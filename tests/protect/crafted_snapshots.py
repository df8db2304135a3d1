"""Checkpoints whose every byte is right, and which no ps has written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.model.snapshot import CheckpointFile, Manifest, PartitionSnapshot
from everstep.native.blob import seal
from everstep.protect.manifest import write_manifest
from everstep.protect.snapshot_file import MarksBlob, Pages, SnapshotFileWriter, SnapshotHead, read_snapshot_file
from everstep.storage.places import open_place


def of_bodies(marks: bytes) -> bytes:
    """The marks as a blob of another kind, with a part: what such a blob has, and marks never do."""
    data = bytearray(marks) + struct.pack("<6I", 1, 1, 0, 64, 0, 0) + bytes(64)
    struct.pack_into("<H", data, 6, 3)
    struct.pack_into("<I", data, 12, 1)
    return seal(bytes(data))


def craft(where: Path | str, manifest: Manifest, partition: int, change: Callable[[bytes], bytes]) -> None:
    """The marks of this partition's newest snapshot become others; file and manifest say so with right checksums."""
    place = open_place(where)
    snapshot = manifest.snapshots[partition]
    file = snapshot.files[-1]
    with place.open(file.path) as stream:
        parts = list(read_snapshot_file(stream, file.path, file))
    with place.create(file.path) as out:
        writer = SnapshotFileWriter(out.write)
        for part in parts:
            match part:
                case SnapshotHead():
                    writer.head(part)
                case MarksBlob():
                    writer.marks(change(bytes(part)))
                case Pages():
                    writer.pages(part.table, part.layout, part.numbers, part.data)
                case rows:
                    writer.rows(rows)
        writer.end()
        out.commit()
    snapshots = [
        i if i.partition != snapshot.partition else _with(i, writer.checkpoint_file(file.path))
        for i in manifest.snapshots
    ]
    write_manifest(place, msgspec.structs.replace(manifest, snapshots=tuple(snapshots)))


def _with(snapshot: PartitionSnapshot, file: CheckpointFile) -> PartitionSnapshot:
    return msgspec.structs.replace(snapshot, files=(*snapshot.files[:-1], file))
