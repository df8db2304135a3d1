"""Copies that begin and end with idle spans are whole, checked block by block, and the same as their twin's."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from everstep.native import SpanCopier, crc32c
from everstep.testing.span_copier_twin import SpanCopierTwin, slow_crc32c

DEADLINE_S = 30.0


def addresses(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([a.ctypes.data for a in arrays], np.uint64)


def pieces(draws: np.random.Generator, count: int) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Pieces of any size, and where they lie: with gaps."""
    arrays = [draws.integers(0, 256, int(draws.integers(0, 700)), dtype=np.uint8) for _ in range(count)]
    at, end = [], 0
    for array in arrays:
        end += int(draws.integers(0, 100))
        at.append(end)
        end += len(array)
    return arrays, np.array(at, np.int64), end + int(draws.integers(0, 50))


def copied(copier: Any, arrays: list[np.ndarray], at: np.ndarray, size: int, block: int, opens: list[int]) -> Any:
    into, sums = np.full(size, 7, np.uint8), np.zeros(-(-size // block), np.uint32)
    copier.load(addresses(arrays), at, np.array([len(a) for a in arrays], np.int64), into, sums)
    for limit in opens:
        copier.open(limit)
        copier.close()
    copier.finish()
    return into, sums


@pytest.mark.parametrize("seed", range(20))
def test_what_is_copied_is_what_the_twin_copies(seed: int) -> None:
    draws = np.random.default_rng(seed)
    block = int(draws.integers(1, 300))
    arrays, at, size = pieces(draws, int(draws.integers(0, 12)))
    opens = [int(draws.integers(0, 2000)) for _ in range(4)]
    mine = copied(SpanCopier(block), arrays, at, size, block, opens)
    twin = copied(SpanCopierTwin(block), arrays, at, size, block, opens)
    assert np.array_equal(mine[0], twin[0]) and np.array_equal(mine[1], twin[1])
    assert [crc32c(mine[0][i * block : (i + 1) * block].tobytes()) for i in range(len(mine[1]))] == mine[1].tolist()
    assert slow_crc32c(b"123456789") == 0xE3069283


def test_every_snapshot_of_thousands_is_of_one_step() -> None:
    """The state changes behind each copy, as an optimizer changes it; spans open and close meanwhile."""
    state = [np.zeros(size, np.uint64) for size in (1, 700, 3000, 5)]
    at = np.cumsum([0] + [a.nbytes for a in state])
    sizes = np.array([a.nbytes for a in state], np.int64)
    into, block = np.zeros(int(at[-1]), np.uint8), 1024
    sums = np.zeros(-(-len(into) // block), np.uint32)
    copier = SpanCopier(block)
    for step in range(3000):
        for array in state:
            array[:] = step
        copier.load(addresses(state), at[:-1], sizes, into, sums)
        for _ in range(step % 3):
            copier.open(1 << 30)
            copier.close()
        copier.finish()
        assert (into.view(np.uint64) == step).all(), f"the copy of step {step} has something else"
    inside, late, stalled, blocks, _ = copier.counts()
    assert inside + late + stalled == 3000 * len(into) and blocks * block >= late


def test_a_span_copies_by_itself_as_far_as_it_may() -> None:
    source = np.arange(1 << 20, dtype=np.uint8)
    into, sums = np.zeros(1 << 20, np.uint8), np.zeros(16, np.uint32)
    copier = SpanCopier(1 << 16)
    copier.load(addresses([source]), np.zeros(1, np.int64), np.array([1 << 20]), into, sums)
    copier.open(5 << 16)
    until(lambda: copier.counts()[0] == 5 << 16)
    assert copier.left == 11 << 16
    copier.close()
    copier.open(1)
    copier.close()
    assert copier.finish() == 11 << 16 and copier.left == 0
    assert np.array_equal(into, source)


def test_behind_a_span_only_a_block_that_was_begun_in_it_ends() -> None:
    source = np.ones(64 << 20, np.uint8)
    into, sums = np.zeros(64 << 20, np.uint8), np.zeros(64, np.uint32)
    copier = SpanCopier(1 << 20)
    for _ in range(10):
        copier.load(addresses([source]), np.zeros(1, np.int64), np.array([64 << 20]), into, sums)
        before = sum(copier.counts()[:2])
        copier.open(1 << 40)
        until(lambda before=before: sum(copier.counts()[:2]) > before)  # type: ignore[misc]
        copier.close()
        left = copier.left
        copier.drop()  # (waits for the block in hand)
        assert copier.counts()[3] <= 10 and left <= 64 << 20
        assert sum(copier.counts()[:2]) - before <= (64 << 20) - left
    into[:] = 0
    time.sleep(0.01)
    assert not into.any(), "something was copied behind drop()"


def test_the_interpreter_runs_on_while_a_rest_is_copied() -> None:
    source = np.ones(128 << 20, np.uint8)
    into, sums = np.zeros(128 << 20, np.uint8), np.zeros(128, np.uint32)
    copier = SpanCopier(1 << 20)
    for _ in range(50):  # (on a busy machine this thread may not run once while a copy takes place)
        copier.load(addresses([source]), np.zeros(1, np.int64), np.array([128 << 20]), into, sums)
        done: list[int] = []
        thread = threading.Thread(target=lambda done=done: done.append(copier.finish()))  # type: ignore[misc]
        thread.start()
        turns = 0
        while thread.is_alive():
            turns += 1
        assert done == [128 << 20]
        if turns > 1:
            return
    raise AssertionError("the copy held the interpreter's lock")


@pytest.mark.parametrize(
    ("at", "sizes", "into", "sums", "words"),
    [
        ([-1], [4], 16, 1, "inside of into"),
        ([13], [4], 16, 1, "inside of into"),
        ([0], [17], 16, 1, "inside of into"),
        ([4, 2], [1, 1], 16, 1, "ascend"),
        ([0, 3], [4, 1], 16, 1, "not overlap"),
        ([0], [1, 1], 16, 1, "one length"),
        ([0], [4], 17, 1, "each block"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(at: list[int], sizes: list[int], into: int, sums: int, words: str) -> None:
    source = [np.zeros(32, np.uint8) for _ in at]
    with pytest.raises(ValueError, match=words):
        SpanCopier(16).load(
            addresses(source),
            np.array(at, np.int64),
            np.array(sizes, np.int64),
            np.zeros(into, np.uint8),
            np.zeros(sums, np.uint32),
        )


def until(seen: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.001)
