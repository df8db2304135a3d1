"""Checkpoints whose every byte is right, and which no ps has written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.model.image import BucketImage, ImageFile, Manifest
from everstep.native.blob import seal
from everstep.protect.imagefile import ImageFileWriter, ImageHead, MarksBlob, Pages, read_image_file
from everstep.protect.manifest import write_manifest
from everstep.storage.places import open_place


def of_bodies(marks: bytes) -> bytes:
    """The marks as a blob of another kind, with a part: what such a blob has, and marks never do."""
    data = bytearray(marks) + struct.pack("<6I", 1, 1, 0, 64, 0, 0) + bytes(64)
    struct.pack_into("<H", data, 6, 3)
    struct.pack_into("<I", data, 12, 1)
    return seal(bytes(data))


def craft(where: Path | str, manifest: Manifest, bucket: int, change: Callable[[bytes], bytes]) -> None:
    """The marks of this bucket's newest image become others; file and manifest say so with right checksums."""
    place = open_place(where)
    image = manifest.images[bucket]
    file = image.files[-1]
    with place.open(file.path) as stream:
        parts = list(read_image_file(stream, file.path, file))
    with place.create(file.path) as out:
        writer = ImageFileWriter(out.write)
        for part in parts:
            match part:
                case ImageHead():
                    writer.head(part)
                case MarksBlob():
                    writer.marks(change(bytes(part)))
                case Pages():
                    writer.pages(part.table, part.layout, part.numbers, part.data)
                case rows:
                    writer.rows(rows)
        writer.end()
        out.commit()
    images = [i if i.bucket != image.bucket else _with(i, writer.image_file(file.path)) for i in manifest.images]
    write_manifest(place, msgspec.structs.replace(manifest, images=tuple(images)))


def _with(image: BucketImage, file: ImageFile) -> BucketImage:
    return msgspec.structs.replace(image, files=(*image.files[:-1], file))
