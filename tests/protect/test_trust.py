"""Whose checkpoint is loaded: the job's own, by its key; another one only if the user says so."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest
from crafted_snapshots import craft, of_bodies
from snapshot_stores import checkpoint, empty_store, new_store, train, writer_of

from everstep.cli.resume import choose, lineage
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError, UntrustedError
from everstep.ids import PartitionId
from everstep.model.snapshot import Manifest
from everstep.net.auth import create_secret, load_secret
from everstep.protect.manifest import (
    ManifestTrust,
    compact,
    decode_manifest,
    digest_of,
    encode_manifest,
    latest_intact,
    manifest_name,
    read_bytes,
    read_manifest,
    write_manifest,
)
from everstep.protect.restore import load_partition, unloadable
from everstep.protect.sources import SnapshotSources
from everstep.storage.places import StoragePlace, open_place

KEY, OTHER = bytes(range(32)), bytes(32)
OURS = ManifestTrust(key=KEY)


@pytest.fixture
def place(tmp_path: Path) -> StoragePlace:
    """Checkpoints 1 and 2, an increment, written with the key."""
    store = new_store()
    writer = writer_of(store)
    for number in (1, 2):
        train(store, number - 1, number, keys=200)
        manifest = checkpoint(writer, tmp_path, number, since=number - 1)
        write_manifest(open_place(tmp_path), manifest, KEY)
    return open_place(tmp_path)


def resummed(data: bytes, old: bytes, new: bytes) -> bytes:
    """The same with other words in it, and the checksum made right."""
    body = data[:-45].replace(old, new)
    assert body != data[:-45]
    return body + b"blake2b-128 " + blake2b(body, digest_size=16).hexdigest().encode() + b"\n"


def test_the_key_says_who_wrote_it(place: StoragePlace) -> None:
    data = read_bytes(place, 2)
    assert OURS.authentic(data)
    assert not ManifestTrust(key=OTHER).authentic(data)
    assert not ManifestTrust().authentic(data)
    assert decode_manifest(data, "m") == decode_manifest(encode_manifest(read_manifest(place, 2)), "m")


@pytest.mark.parametrize(
    "old, new", [(b'"job":"toy"', b'"job":"boy"'), (b'"code":"', b'"code":"0'), (b'"}\n', b'"} \n')]
)
def test_other_words_with_a_right_checksum_are_not_ours(place: StoragePlace, old: bytes, new: bytes) -> None:
    assert not OURS.authentic(resummed(read_bytes(place, 2), old, new))


def test_words_behind_the_code_do_not_count(place: StoragePlace) -> None:
    """What stands after it would win where a name stands twice."""
    data = read_bytes(place, 2)
    assert not OURS.authentic(resummed(data, b'"}\n', b'","job":"boy"}\n'))
    assert not OURS.authentic(resummed(data, b'{"version"', b'{"job":"boy","version"'))


def test_a_file_that_is_another_one_is_none_of_ours(place: StoragePlace, tmp_path: Path) -> None:
    """Its digest is in the manifest, and the manifest has a code."""
    manifest = read_manifest(place, 2)
    craft(tmp_path, manifest, 1, of_bodies)
    with pytest.raises(UntrustedError, match=r"manifest-000002.json has no code.*--trust-checkpoint"):
        read_manifest(place, 2, OURS)
    write_manifest(place, manifest, KEY)
    with pytest.raises(CheckpointError, match=r"not the file that the manifest means"):
        load_partition(empty_store(), place, read_manifest(place, 2, OURS).snapshots[1])


def test_the_newest_of_ours_is_taken(place: StoragePlace) -> None:
    write_manifest(place, read_manifest(place, 2))
    said: list[str] = []
    assert latest_intact(place, trust=OURS, tell=said.append).checkpoint == 1
    assert len(said) == 1 and "has no code: an older everstep" in said[0]
    assert latest_intact(place).checkpoint == 2  # (to be looked at)
    with pytest.raises(UntrustedError, match=r"not written with this job's key.*--secret"):
        read_manifest(place, 1, ManifestTrust(key=OTHER))


def test_older_checkpoints_are_loaded_if_the_user_says_so(place: StoragePlace) -> None:
    """As main wrote them before there was a key."""
    for number in (1, 2):
        write_manifest(place, read_manifest(place, number))
    with pytest.raises(CheckpointError, match="--trust-checkpoint"):
        choose(place, None, OURS)
    with pytest.raises(UntrustedError, match="--trust-checkpoint"):
        choose(place, 2, OURS)
    assert choose(place, None, ManifestTrust(anything=True)).checkpoint == 2
    assert choose(place, None, ManifestTrust(anything=True), below=2).checkpoint == 1
    with pytest.raises(CheckpointError, match="no checkpoint older than 1"):
        choose(place, None, ManifestTrust(anything=True), below=1)


def test_what_was_trusted_is_that_one_and_no_other(place: StoragePlace, tmp_path: Path) -> None:
    """The processes of the job load the very bytes that the user was told about."""
    for number in (1, 2):
        write_manifest(place, read_manifest(place, number))
    spec = JobSpec(resume_from=place.url, trusted=(digest_of(read_bytes(place, 2)),))
    sources = SnapshotSources(spec, tmp_path / "run", KEY)
    assert sources.snapshot(PartitionId(1), 2)[1].partition == 1
    write_manifest(place, msgspec.structs.replace(read_manifest(place, 2), samples_done=1))
    with pytest.raises(UntrustedError):
        SnapshotSources(spec, tmp_path / "run", KEY).snapshot(PartitionId(1), 2)


def test_a_trusted_one_is_tried_before_it_is_taken(place: StoragePlace, tmp_path: Path) -> None:
    craft(tmp_path, read_manifest(place, 2), 1, of_bodies)
    assert [line for line in unloadable(place, read_manifest(place, 2)) if "partition 1" in line]
    assert choose(place, None, ManifestTrust(key=KEY, anything=True)).checkpoint == 1
    with pytest.raises(CheckpointError, match="partition 1: these are not the marks"):
        choose(place, 2, ManifestTrust(anything=True))


def test_a_manifest_tells_the_marks_that_its_files_have(place: StoragePlace) -> None:
    manifest = read_manifest(place, 2)
    wrong = msgspec.structs.replace(manifest.snapshots[0], watermarks=())
    made: Manifest = msgspec.structs.replace(manifest, snapshots=(wrong, *manifest.snapshots[1:]))
    assert [line.partition(": ")[2] for line in unloadable(place, made)] == [
        "its marks are not those that the manifest says"
    ]


def test_compaction_keeps_the_code(place: StoragePlace) -> None:
    compact(place, read_manifest(place, 2), KEY)
    assert OURS.authentic(read_bytes(place, 2))
    assert choose(place, None, OURS).checkpoint == 2


def test_the_key_goes_on_with_the_job(tmp_path: Path) -> None:
    first = create_secret(tmp_path / "secret")
    key = lineage(tmp_path, "")
    assert key == first.checkpoint_key != first.key
    second = create_secret(tmp_path / "second", key)
    assert second.key != first.key
    assert load_secret(tmp_path / "second").checkpoint_key == key == lineage(None, str(tmp_path / "second"))
    assert (tmp_path / "second").stat().st_mode & 0o777 == 0o600
    assert lineage(tmp_path / "nothing", "") == b""
    assert manifest_name(1) == "manifest-000001.json"
