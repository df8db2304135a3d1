"""Random streams that belong to the data, not to the process: a range computed again draws the same numbers.

``seed_range`` seeds the script's streams (torch, numpy, random) from ``(seed, epoch, lo)`` of the range of samples that
the script computes next. A job of several processes calls it before each range; alone, nobody calls it, because the
script's own continuous stream is what plain PyTorch would use.

``Drawing`` calls what reads samples (``__getitem__``, ``collate_fn``, ``transform``) in streams of their own: seeded by
the sample, and apart from the script's, which are put back as they were.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from everstep.data.order import extend_key, make_key

_RANGE: Final = 5  # salts of make_key, apart from those of everstep.data.order
_NUMPY: Final = 6
_BATCH: Final = 7


class RandomStreams:
    """Says who may draw. The streams are one for the whole process: the thread that runs a loop of the script has them,
    and lends them while it waits for its reader; any other thread draws, or puts them back, only while it has them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # how often the thread that has them took them

    def take(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def give(self) -> None:
        self._depth -= 1
        self._lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Wait, in this thread, for another one, which may draw meanwhile."""
        self.take()
        depth = self._depth
        for _ in range(depth):
            self.give()
        try:
            yield
        finally:
            for _ in range(depth):
                self.take()
            self.give()


STREAMS: Final = RandomStreams()


def range_seed(seed: int, epoch: int, lo: int, dataset: int = 0) -> int:
    """Return the seed in ``[0, 2**63)`` of the streams in which the range that begins at ``lo`` of ``epoch`` is
    computed. ``dataset``: the number of the dataset, where a script has several."""
    return extend_key(_epoch_key(seed, dataset, epoch), lo, _RANGE) >> 1


@lru_cache(16)
def _epoch_key(seed: int, dataset: int, epoch: int) -> int:
    return make_key(seed, dataset, epoch)


def seed_streams(seed: int) -> None:
    """Seed the process-wide streams of torch (CPU, and every CUDA device in use), numpy and random with ``seed``, a
    number in ``[0, 2**63)``."""
    _seed_torch(seed)
    # (whether one is initialised is known at once; whether one is available takes 10 us)
    if torch.cuda.is_initialized() and torch.cuda.is_available():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    _seed_numpy(seed)
    random.seed(seed)


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _seed_numpy(seed: int) -> None:
    # numpy and random have the same generator: with the same seed both would draw the same numbers. From 32 bits, numpy
    # makes its state in a fifth of the time that it takes from 64.
    np.random.seed(make_key(seed, _NUMPY) & 0xFFFFFFFF)


def seed_range(seed: int, epoch: int, lo: int, dataset: int = 0) -> None:
    """Seed the script's streams for the range that begins at position ``lo`` of ``epoch``."""
    seed_streams(range_seed(seed, epoch, lo, dataset))


# ------------------------------------------------------------ reading samples


class _States(NamedTuple):
    """Where the streams of torch (on the CPU), numpy and random are."""

    torch: Any
    numpy: Any
    random: Any

    @staticmethod
    def now() -> _States:
        return _States(torch.default_generator.get_state(), np.random.get_state(legacy=True), random.getstate())

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.random)

    def moved(self) -> set[int]:
        """Return the streams (0: torch, 1: numpy, 2: random) that were drawn from since then."""
        now = _States.now()
        out = set()
        if not torch.equal(self.torch, now.torch):
            out.add(0)
        if self.numpy[2:] != now.numpy[2:] or not np.array_equal(self.numpy[1], now.numpy[1]):
            out.add(1)
        if self.random != now.random:
            out.add(2)
        return out


@contextmanager
def untouched() -> Iterator[None]:
    """Put the script's streams back afterwards."""
    STREAMS.take()
    try:
        before = _States.now()
        try:
            yield
        finally:
            before.restore()
    finally:
        STREAMS.give()


class Drawing:
    """Wraps calls that may draw random numbers, each in streams of its own seed.

    Seeding costs more than reading most samples. So a stream is seeded only from the first draw on: calls are made
    together first, and again, seeded, if one of them has drawn from a stream that is not seeded yet."""

    def __init__(self) -> None:
        self._drawn: set[int] = set()

    def __repr__(self) -> str:
        return f"<Drawing from {[('torch', 'numpy', 'random')[i] for i in sorted(self._drawn)]}>"

    def calls(self, seeds: Sequence[int], call: Callable[[int], Any], together: Callable[[], Any] | None = None) -> Any:
        """``[call(0), call(1), ...]``, call i in streams of ``seeds[i]``. ``together``: does the same at once, as long
        as nothing is drawn."""
        with untouched():
            before = _States.now()
            while True:
                if self._drawn or together is None:
                    out = []
                    for i, seed in enumerate(seeds):
                        self._seed(seed)
                        out.append(call(i))
                else:
                    out = together()
                new = before.moved() - self._drawn
                if not new:
                    return out
                self._drawn |= new
                before.restore()

    def _seed(self, seed: int) -> None:
        for stream in self._drawn:
            (_seed_torch, _seed_numpy, random.seed)[stream](seed)


class DrawWatch:
    """Finds out whether any of the calls under watch drew."""

    drawn = False


def in_streams_of(seed: int, call: Callable[[], Any], watch: DrawWatch | None = None) -> Any:
    """Do ``call()`` in streams of ``seed``."""
    with untouched():
        _seed_torch(seed)
        _seed_numpy(seed)
        random.seed(seed)
        before = None if watch is None or watch.drawn else _States.now()
        out = call()
        if watch is not None and before is not None:
            watch.drawn = bool(before.moved())
        return out


def batch_seed(seed: int, epoch: int, first: int) -> int:
    """Return the seed of the streams in which the batch whose first sample is ``first`` is put together."""
    return make_key(seed, epoch, first, _BATCH) >> 1
