"""An agent takes in blocks of a neighbour's copy while stages of its own node wait, and says which it did not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everstep.ids import Incarnation, Slot
from everstep.native import crc32c
from everstep.net.messages import CopyBegun, CopyBlocks, CopyTaken, DataRequest
from everstep.pipeline import copy_store
from everstep.pipeline.copy_slots import BLOCK_BYTES
from everstep.pipeline.copy_store import CopyStore
from everstep.pipeline.idle_board import FOLDER, IdleBoard, IdleEntry

ME = Slot(0), Incarnation(1)
BLOCKS = 6


@pytest.fixture
def entry(tmp_path: Path) -> IdleEntry:
    return IdleEntry(tmp_path, 3, 1)


@pytest.fixture
def store(tmp_path: Path, entry: IdleEntry) -> Iterator[CopyStore]:
    made = CopyStore(IdleBoard(tmp_path))
    yield made
    made.close()


def ask(store: CopyStore, request: DataRequest, body: bytes) -> CopyTaken:
    answer, _ = store.handle(request, memoryview(body), None)
    assert isinstance(answer, CopyTaken), answer
    return answer


def begin(store: CopyStore) -> None:
    ask(store, CopyBegun(*ME, 0, 1, 7, 0, 0, BLOCKS * BLOCK_BYTES), b"")


def block(store: CopyStore, number: int) -> CopyTaken:
    data = bytes([number]) * BLOCK_BYTES
    sums = np.array([crc32c(data)], np.uint32).tobytes()
    return ask(store, CopyBlocks(*ME, 0, 7, number, 1), sums + data)


def test_in_waits_blocks_are_taken_at_once(store: CopyStore, entry: IdleEntry) -> None:
    begin(store)
    entry.waits(time.monotonic(), 0.0)
    assert [block(store, n).late_blocks for n in range(BLOCKS)] == [0] * BLOCKS


def test_while_the_only_stage_computes_blocks_are_put_off_but_not_for_ever(
    store: CopyStore, entry: IdleEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_store, "MOST_S", 0.01)
    begin(store)
    assert [block(store, n).late_blocks for n in range(BLOCKS)] == list(range(1, BLOCKS + 1))


def test_a_block_waits_for_the_next_wait(store: CopyStore, entry: IdleEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_store, "MOST_S", 60.0)
    begin(store)
    found: list[CopyTaken] = []
    sender = threading.Thread(target=lambda: found.append(block(store, 0)), daemon=True)
    sender.start()
    time.sleep(0.02)
    assert not found
    entry.waits(time.monotonic(), 0.0)
    sender.join(30.0)
    assert [one.late_blocks for one in found] == [0]


def test_what_a_stage_that_is_gone_said_does_not_count(tmp_path: Path, entry: IdleEntry) -> None:
    assert len(IdleBoard(tmp_path).stages()) == 1
    path = tmp_path / FOLDER / "worker-3.stage-1"
    data = bytearray(path.read_bytes())
    data[:8] = (2**22 + 1).to_bytes(8, "little")  # (no process has such a number)
    path.write_bytes(data)
    assert IdleBoard(tmp_path).stages() == []
    (tmp_path / FOLDER / "worker-4.stage-0").touch()  # (just being made)
    assert IdleBoard(tmp_path).stages() == []


def test_a_board_finds_stages_that_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.pipeline.idle_board._LOOK_S", 0.0)
    board = IdleBoard(tmp_path / "run")
    assert board.stages() == []
    (tmp_path / "run").mkdir()
    IdleEntry(tmp_path / "run", 0, 0).waits(5.0, 0.25)
    assert [(one.waits_since_s, one.usual_s) for one in board.stages()] == [(5.0, 0.25)]
