"""Checkpoints in an S3-compatible store (moto, in this process), also while it cannot be reached."""

from __future__ import annotations

import logging
import threading

import pytest
from s3_server import S3, needs_s3, s3
from snapshot_stores import PARTITIONS, checkpoint, digests, empty_store, new_store, train, writer_of

from everstep.brain.events import SnapshotsWritten
from everstep.errors import CheckpointError, StorageError
from everstep.protect.manifest import compact, drop_checkpoints, latest_intact, list_checkpoints, problems
from everstep.protect.restore import load_partition
from everstep.storage.places import open_place

__all__ = ["s3"]  # (a fixture)
pytestmark = needs_s3


def test_a_checkpoint_there_and_back(s3: S3) -> None:
    url = "s3://models/job/checkpoints"
    store = new_store()
    writer = writer_of(store)
    train(store, 0, 3)
    checkpoint(writer, url, 1)
    train(store, 3, 4, keys=100)
    manifest = checkpoint(writer, url, 2, since=1)
    place = open_place(url)
    assert list_checkpoints(place) == [1, 2]
    assert latest_intact(place) == manifest
    again = empty_store()
    for snapshot in manifest.snapshots:
        load_partition(again, url, snapshot)
    assert digests(again) == digests(store)
    merged = compact(place, manifest)
    assert list(problems(place, merged)) == []
    assert drop_checkpoints(place, {1}) == PARTITIONS
    file = merged.snapshots[0].files[0]
    data = bytearray(place.read(file.path, 1 << 30))
    data[len(data) // 3] ^= 1
    place.put(file.path, bytes(data))
    (line,) = problems(place, merged)
    assert line.startswith(f"{url}/{file.path} was changed")
    place.delete(file.path)
    with pytest.raises(CheckpointError, match=r"bucket-0000.* is missing"):
        load_partition(empty_store(), url, merged.snapshots[0])


def test_a_large_file_goes_in_parts(s3: S3) -> None:
    place = open_place("s3://models/large")
    piece = bytes(range(256)) * 4096
    with place.create("a/b") as file:
        for _ in range(20):
            file.write(piece)
        assert place.sizes() == {}, "not there before its commit"
        file.commit()
    assert place.read("a/b", 1 << 30) == piece * 20
    with place.create("a/c") as file:
        for _ in range(20):
            file.write(piece)
    assert set(place.sizes()) == {"a/b"}, "what is not committed never appears"


def test_an_empty_place_and_one_that_is_not_there(s3: S3) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        latest_intact(open_place("s3://models/nothing"))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        latest_intact(open_place("s3://nosuchbucket/x"))
    answer = writer_of(new_store(), retry_s=0.0).write(1, 0, "s3://nosuchbucket/x", [0])
    assert "cannot write s3://nosuchbucket/x/images/000001/bucket-0000" in answer.error


def test_a_store_that_cannot_be_reached_is_tried_again_while_training_goes_on(
    s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = "s3://models/away"
    store = new_store()
    train(store, 0, 2)
    writer = writer_of(store)
    s3.stop()
    with pytest.raises(StorageError, match=f"cannot list {url}"):
        list_checkpoints(open_place(url))
    done = threading.Event()
    answers: list[SnapshotsWritten] = []

    def on_done(answer: SnapshotsWritten) -> None:
        answers.append(answer)
        done.set()

    writer.take(1, 0, url, range(PARTITIONS), on_done)
    at = 2
    while not any("trying again" in r.getMessage() for r in caplog.records):
        train(store, at, at + 1)
        at += 1
    assert not done.is_set()
    s3.start()
    assert done.wait(60)
    writer.close()
    assert not answers[0].error and len(answers[0].snapshots) == PARTITIONS
    assert sum("trying again" in r.getMessage() for r in caplog.records) <= PARTITIONS


def test_a_store_that_stays_away_is_one_line_in_the_answer(s3: S3) -> None:
    store = new_store()
    train(store, 0, 1)
    s3.stop()
    answer = writer_of(store, retry_s=1.0).write(1, 0, "s3://models/away", [0])
    assert answer.error.startswith("cannot write s3://models/away/images/000001/bucket-0000-base-")
    assert "\n" not in answer.error and not answer.snapshots
    s3.start()
