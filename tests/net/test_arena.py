"""Shared memory: regions, growth, and what a ps refuses to map."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import PlatformError, WireError
from everstep.net.arena import ALIGN, Arena, map_arena


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=60))
def test_regions_never_overlap_and_come_back(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(4096)
    held: dict[int, int] = {}
    for take, n in steps:
        if take or not held:
            offset = arena.alloc(n)
            assert offset % ALIGN == 0 and offset + n <= arena.size
            assert all(offset + n <= o or o + m <= offset for o, m in held.items() if n and m)
            held[offset] = n
        else:
            offset = sorted(held)[n % len(held)]
            arena.free(offset)
            del held[offset]
    for offset in held:
        arena.free(offset)
    assert arena.used_bytes == 0
    assert arena.alloc(arena.size) == 0  # one piece again
    arena.close()


def test_views_survive_growth() -> None:
    arena = Arena(4096)
    offset = arena.alloc(400)
    before = arena.array(offset, 100, np.float32)
    before[:] = 7
    arena.grow(1 << 20)
    after = arena.array(offset, (10, 10), np.float32)
    assert after.sum() == 700
    before[0] = 8
    assert after[0, 0] == 8  # the same pages
    arena.close()
    assert before[1] == 7


def test_mistakes() -> None:
    arena = Arena(4096, max_bytes=8192)
    with pytest.raises(ValueError, match="is not allocated"):
        arena.free(64)
    with pytest.raises(PlatformError, match="at most 8192 allowed"):
        arena.grow(10_000)
    with pytest.raises((ValueError, TypeError)):
        arena.array(4096, 1, np.float32)
    arena.close()
    arena.close()


def test_it_can_never_shrink() -> None:
    arena = Arena(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    arena.close()


def test_two_maps_are_one_memory() -> None:
    arena = Arena(8192)
    view = map_arena(os.dup(arena.fd), 8192, 1 << 20)
    arena.view[5:8] = b"abc"
    assert bytes(view[5:8]) == b"abc"
    arena.close()
    assert bytes(view[5:8]) == b"abc"


def test_what_is_refused() -> None:
    arena = Arena(4096)
    with pytest.raises(WireError, match="has 4096 bytes, not 8192"):
        map_arena(os.dup(arena.fd), 8192, 1 << 20)
    with pytest.raises(WireError, match="at most 1048576 allowed"):
        map_arena(os.dup(arena.fd), 2 << 20, 1 << 20)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(WireError, match="not sealed"):
        map_arena(unsealed, 4096, 1 << 20)
    with pytest.raises(WireError, match="not a memfd"):
        map_arena(os.open("/dev/null", os.O_RDWR), 4096, 1 << 20)
    arena.close()
