"""Names from outside are bare: nothing outside of its place is read or deleted by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.brain.events import Event, NodeJoined, SnapshotsWritten
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError, StorageError, WireError
from everstep.model.snapshot import CheckpointFile, Manifest, PartitionSnapshot
from everstep.net import messages as wire
from everstep.net.frames import decode_header
from everstep.protect.manifest import decode_manifest, drop_checkpoints, encode_manifest, write_manifest
from everstep.storage.places import LocalPlace

EVIL = [
    "/home/me/thesis.tex",
    "../thesis.tex",
    "images/000001/../../thesis.tex",
    "images/../../thesis.tex",
    "images/000001/bucket-0001/../../../thesis.tex",
    "images/000001/bucket-\n0001.img",
    "images/000001/bucket-\x1b[2J.img",
    "images/000001/thesis.tex",
    "thesis.tex",
    "images/000001/bucket-a\x00.img",
    "",
]


def snapshot(path: str) -> PartitionSnapshot:
    return PartitionSnapshot(partition=0, seq=1, fingerprint=0, watermarks=(), files=(CheckpointFile(path, 1, "00"),))  # type: ignore[arg-type]


def manifest(path: str, number: int) -> Manifest:
    return Manifest(
        job="j", checkpoint=number, at=1.0, seed=0, partitions=1, snapshots=(snapshot(path),), spec=JobSpec()
    )


@pytest.mark.parametrize("path", EVIL)
def test_such_a_file_is_not_written_by_any_ps(path: str) -> None:
    call = wire.Call(1, SnapshotsWritten(1, (snapshot(path),)))  # type: ignore[arg-type]
    with pytest.raises(WireError, match="malformed request"):
        decode_header(msgspec.msgpack.Decoder(wire.Call), msgspec.msgpack.encode(call), "request")


@pytest.mark.parametrize("path", EVIL)
def test_such_a_file_is_in_no_manifest(path: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode_manifest(encode_manifest(manifest(path, 1)), "manifest-000001.json")


@pytest.mark.parametrize("path", ["../thesis.tex", "images/000001/../../../thesis.tex"])
def test_such_a_file_is_not_deleted_even_if_a_manifest_could_name_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked again before anything is deleted."""
    mine = tmp_path / "thesis.tex"
    mine.write_text("years")
    place = LocalPlace(tmp_path / "checkpoints")
    for number, name in ((1, path), (2, "images/000002/bucket-0000-base-aa.img")):
        write_manifest(place, manifest(name, number))
    made = {1: manifest(path, 1), 2: manifest("images/000002/bucket-0000-base-aa.img", 2)}
    monkeypatch.setattr("everstep.protect.manifest.read_manifest", lambda place, number: made[number])
    with pytest.raises(StorageError, match="nothing is deleted"):
        drop_checkpoints(place, [1])
    for call in (place.delete, place.open, place.create):
        with pytest.raises(StorageError, match="no path within a place"):
            call(path)
    assert mine.read_text() == "years"


@pytest.mark.parametrize("name", ["a/b", "..", ".", "x\x1b[31m", "x\ny", "a\\b", "x" * 300])
def test_names_of_nodes_are_bare(name: str) -> None:
    hello: Any = NodeJoined(name, "", 0, 0, ())  # type: ignore[arg-type]
    with pytest.raises(WireError, match="malformed request"):
        decode_header(msgspec.msgpack.Decoder(wire.Call), msgspec.msgpack.encode(wire.Call(1, hello)), "request")


def test_good_names_pass() -> None:
    for path in (
        "images/000012/bucket-0003-base-0a1b2c3d.img",
        "images/123456789/replica-1.2-ab.rep",
        "images/000001/bucket-0001-merged-aabbccdd.img",
    ):
        decode_manifest(encode_manifest(manifest(path, 1)), "m")
    for name in ("node0", "host.domain-12ab", "my node", "ノード"):
        hello: Any = NodeJoined(name, "10.0.0.1", 0, 0, ())  # type: ignore[arg-type]
        decode_header(msgspec.msgpack.Decoder(wire.Call), msgspec.msgpack.encode(wire.Call(1, hello)), "request")
    assert msgspec.msgpack.Decoder(Event) is not None
