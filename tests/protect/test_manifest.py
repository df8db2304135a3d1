"""Manifests: the newest checkpoint that is complete and intact wins; each kind of damage is one clear line."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest
from snapshot_stores import PARTITIONS, checkpoint, digests, empty_store, new_store, train, writer_of

from everstep.errors import CheckpointError
from everstep.model.snapshot import Manifest
from everstep.protect.manifest import (
    checkpoint_place,
    decode_manifest,
    drop_checkpoints,
    encode_manifest,
    latest_intact,
    list_checkpoints,
    manifest_name,
    problems,
    read_manifest,
    write_manifest,
)
from everstep.protect.restore import load_partition
from everstep.storage.places import open_place

FLIPS = 1000


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[bytes]]]:
    """Checkpoints 1 (base), 2 and 3 (increments), and the digests of the partitions at each."""
    where = tmp_path_factory.mktemp("taken")
    store = new_store()
    writer = writer_of(store)
    at: list[list[bytes]] = []
    for n in range(1, 4):
        train(store, n - 1, n, keys=400)
        checkpoint(writer, where, n, since=n - 1, at=100.0 * n)
        at.append(digests(store))
    return where, at


@pytest.fixture
def copy(taken: tuple[Path, list[list[bytes]]], tmp_path: Path) -> Path:
    shutil.copytree(taken[0], tmp_path / "copy")
    return tmp_path / "copy"


def wrong(where: Path, number: int) -> list[str]:
    place = open_place(where)
    try:
        return list(problems(place, read_manifest(place, number)))
    except CheckpointError as error:
        return [str(error)]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_intact_checkpoints_have_no_problems(copy: Path) -> None:
    assert [wrong(copy, n) for n in (1, 2, 3)] == [[], [], []]
    assert latest_intact(open_place(copy)).checkpoint == 3


def test_a_flipped_bit_anywhere_is_found(copy: Path) -> None:
    """Each of FLIPS random bits of all files of a checkpoint; the manifest counts as often as all snapshots."""
    rng = random.Random(1)
    place = open_place(copy)
    manifest = read_manifest(place, 3)
    name = copy / manifest_name(3)
    files = [copy / f.path for i in manifest.snapshots for f in i.files]
    sizes = [p.stat().st_size for p in files]
    found = 0
    for _ in range(FLIPS):
        path = name if rng.random() < 0.5 else rng.choices(files, sizes)[0]
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        if path == name:
            with pytest.raises(CheckpointError) as caught:
                read_manifest(place, 3)
            assert str(path) in str(caught.value)
        else:
            snapshot = next(i for i in manifest.snapshots if any(copy / f.path == path for f in i.files))
            alone = msgspec.structs.replace(manifest, snapshots=(snapshot,), partitions=1)
            lines = [line for line in problems(place, alone) if manifest_name(3) not in line]
            assert len(lines) == 1 and str(path) in lines[0], f"bit {bit} of {path}: {lines}"
        found += 1
        flip(path, bit)
    assert found == FLIPS and wrong(copy, 3) == []


def test_a_flipped_bit_never_loads_as_anything_else(copy: Path) -> None:
    rng = random.Random(2)
    snapshot = read_manifest(open_place(copy), 3).snapshots[1]
    for _ in range(60):
        path = copy / rng.choice(snapshot.files).path
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        store = empty_store()
        with pytest.raises(CheckpointError, match="bucket-0001"):
            load_partition(store, str(copy), snapshot)
        assert store.owned() == []
        flip(path, bit)


def test_a_bit_is_found_even_if_the_manifest_does_not_know_the_file(copy: Path) -> None:
    """The file's own checksums cover every bit of it."""
    from everstep.protect.snapshot_file import read_snapshot_file

    rng = random.Random(3)
    path = copy / read_manifest(open_place(copy), 3).snapshots[0].files[0].path
    good = path.read_bytes()
    for _ in range(300):
        bit = rng.randrange(len(good) * 8)
        flip(path, bit)
        with pytest.raises(CheckpointError), path.open("rb") as stream:
            list(read_snapshot_file(stream, str(path)))
        path.write_bytes(good)


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 39, 40, 1000, -1])
def test_a_cut_file_is_found(copy: Path, keep: int) -> None:
    manifest = read_manifest(open_place(copy), 3)
    path = copy / manifest.snapshots[2].files[0].path
    path.write_bytes(path.read_bytes()[:keep])
    (line,) = wrong(copy, 3)
    assert "bucket-0002" in line and "cut" in line
    store = empty_store()
    with pytest.raises(CheckpointError, match=r"bucket-0002.*(cut|not an image)"):
        load_partition(store, str(copy), manifest.snapshots[2])


def test_a_missing_file_is_named(copy: Path) -> None:
    manifest = read_manifest(open_place(copy), 3)
    (copy / manifest.snapshots[1].files[0].path).unlink()
    (line,) = wrong(copy, 3)
    assert line.startswith(str(copy)) and line.endswith("is missing: checkpoint 3 needs it for partition 1")
    assert wrong(copy, 1) != []
    with pytest.raises(
        CheckpointError, match=r"no checkpoint that is complete and intact; of the newest: .* is missing"
    ):
        latest_intact(open_place(copy))


def test_a_file_of_another_checkpoint_in_its_place_is_found(copy: Path) -> None:
    a, b = (read_manifest(open_place(copy), n).snapshots[0].files[-1] for n in (2, 3))
    shutil.copy(copy / a.path, copy / b.path)
    (line,) = wrong(copy, 3)
    assert b.path in line


def test_a_manifest_without_a_partition_is_incomplete(copy: Path) -> None:
    place = open_place(copy)
    manifest = read_manifest(place, 3)
    write_manifest(place, msgspec.structs.replace(manifest, checkpoint=4, snapshots=manifest.snapshots[1:]))
    assert wrong(copy, 4) == ["manifest-000004.json has no snapshot of partition 0"]
    assert latest_intact(place).checkpoint == 3


def test_the_newest_intact_one_wins_and_says_why(copy: Path, taken: tuple[Path, list[list[bytes]]]) -> None:
    place = open_place(copy)
    newest = read_manifest(place, 3).snapshots[0].files[-1]
    flip(copy / newest.path, 4321)
    said: list[str] = []
    manifest = latest_intact(place, tell=said.append)
    assert manifest.checkpoint == 2
    assert len(said) == 1 and said[0].startswith("checkpoint 3 is left out: ") and newest.path in said[0]
    store = empty_store()
    for snapshot in manifest.snapshots:
        load_partition(store, str(copy), snapshot)
    assert digests(store) == taken[1][1]


def test_a_newer_version_is_told_apart_from_damage(copy: Path) -> None:
    place = open_place(copy)
    manifest = msgspec.structs.replace(read_manifest(place, 3), version=4, checkpoint=4)
    write_manifest(place, manifest)
    with pytest.raises(CheckpointError, match=r"manifest-000004.json is of version 4, .* reads version 3"):
        read_manifest(place, 4)
    path = copy / read_manifest(place, 3).snapshots[0].files[0].path
    import struct
    import zlib

    data = path.read_bytes()
    start = struct.pack("<8sHH", data[:8], 2, 0)
    path.write_bytes(start + struct.pack("<I", zlib.crc32(start)) + data[16:])
    (line,) = wrong(copy, 3)
    assert "is of version 2, this everstep reads version 1" in line


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "not-there"):
        with pytest.raises(CheckpointError, match=r"holds no checkpoint: there is no manifest-000001.json"):
            latest_intact(checkpoint_place(where))
    (tmp_path / "manifest-000001.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not end with its checksum"):
        latest_intact(checkpoint_place(tmp_path))


def test_manifest_bytes_there_and_back() -> None:
    manifest = Manifest(job="j", checkpoint=1, at=1.5, seed=3, partitions=1, snapshots=())
    data = encode_manifest(manifest)
    assert decode_manifest(data, "m") == manifest
    for wrong_bytes in (data[:-1], data[1:], data + b"\n", data.replace(b"\n", b" ", 1), b""):
        with pytest.raises(CheckpointError, match=r"^m was "):
            decode_manifest(wrong_bytes, "m")


def test_dropping_takes_what_was_given_up_with_it(copy: Path) -> None:
    place = open_place(copy)
    place.put("images/000002/bucket-0001-delta-0badc0de.img", b"given up")
    place.put("images/000002/.bucket-0001-delta-0badc0de.img.12345678.tmp", b"of a writer that was killed")
    place.put("images/000004/bucket-0001-base-0badc0de.img", b"of the next one, being written")
    place.put("images/notes", b"not ours")
    assert drop_checkpoints(place, set()) == 2
    left = [p for p in place.sizes() if "0badc0de" in p or "notes" in p]
    assert sorted(left) == ["images/000004/bucket-0001-base-0badc0de.img", "images/notes"]
    assert [wrong(copy, n) for n in (1, 2, 3)] == [[], [], []]


def test_dropping_keeps_what_others_need(copy: Path) -> None:
    place = open_place(copy)
    assert drop_checkpoints(place, {1, 2}) == 0, "3 builds on both"
    assert list_checkpoints(place) == [3] and wrong(copy, 3) == []
    assert drop_checkpoints(place, {3}) == 3 * PARTITIONS
    assert place.sizes() == {}
    assert drop_checkpoints(place, {3}) == 0
