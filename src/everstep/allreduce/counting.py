"""``enumerate(job.steps(loader))`` counts the loop's steps, on every worker and in every pass.

A script that accumulates gradients counts its iterations so. An iteration may be one of several passes of a step, may
be done again after a loss, and a worker that joins begins in the middle of a loop; the number of steps is the same on
all workers. What ``enumerate`` counts lies in its object alone, so it is set there, before each batch.
"""

from __future__ import annotations

import ctypes
import gc
from types import FrameType, GeneratorType
from typing import Any, Final

_AT: Final = object.__basicsize__  # of the count, behind the head that every object has
_FRAMES: Final = 8


class Enumerated:
    """Finds the ``enumerate`` objects that the loop over batches goes through.

    Nothing here refers to them: a loop that the script leaves has to end at once. So they are looked for when the first
    batch is asked for, and again where their count is not the right one by itself."""

    def __init__(self, frame: FrameType | None) -> None:
        """Take ``frame``: of the generator that gives the batches, as in ``set``."""
        self._starts = {id(one): _parts(one)[1] for one in _found(frame)}
        self._next = 0  # what they give next by themselves, from their start

    def __repr__(self) -> str:
        return f"<Enumerated {len(self._starts)}>"

    def set(self, frame: FrameType | None, number: int) -> set[int]:
        """The next batch is of step ``number``, from the loop's begin. Returns what the script sees as its count."""
        if not self._starts:
            return set()
        if number != self._next:
            for one in _found(frame):
                if id(one) in self._starts:
                    _set(one, self._starts[id(one)] + number)
        self._next = number + 1
        return {start + number for start in self._starts.values()}


def _found(frame: FrameType | None) -> list[Any]:
    generators: set[int] = set()
    while frame is not None and len(generators) < _FRAMES:
        generators.add(id(frame))
        frame = frame.f_back
    found = []
    for one in gc.get_objects():
        if type(one) is enumerate:
            source, count = _parts(one)
            if isinstance(source, GeneratorType) and id(source.gi_frame) in generators and _set(one, count):
                found.append(one)
    return found


class SampleCounts:
    """Integers of the script that grow by a pass's samples: an accumulation may go by them in several passes, too."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._others: set[str] = set()  # that grow by one
        self._before: dict[str, int] = {}
        self._ended = ""  # counter that was set back in a pass before the last one, whose step was asked for there

    def __repr__(self) -> str:
        return f"<SampleCounts {sorted(self._names)}>"

    def begin(self, frame: FrameType | None) -> None:
        """The script gets a batch next; ``frame``: that asks for it."""
        self._before = _integers(frame)

    def end(self, frame: FrameType | None, samples: int, counts: set[int], asked: bool) -> None:
        """A pass before the last one is over. ``counts``: what enumerate said. ``asked``: for a step."""
        for name, now in _integers(frame).items():
            grown = now - self._before.get(name, now)
            if grown == samples > 1:
                self._names.add(name)
            elif grown == 1 and now not in counts:
                self._others.add(name)
            elif grown < 0 and asked and name in self._names:
                self._ended = name

    @property
    def trusted(self) -> bool:
        """Return whether a step that is asked for in a step's last pass alone is so by a count of samples."""
        return bool(self._names) and not self._others

    def ended_early(self) -> str:
        """Return the counter by which the script has asked for a step in a pass before the last one."""
        name, self._ended = self._ended, ""
        return name


def _integers(frame: FrameType | None) -> dict[str, int]:
    found: dict[str, int] = {}
    depth = 0
    while frame is not None and depth < _FRAMES:
        if not str(frame.f_globals.get("__name__", "")).startswith(("everstep.", "torch.")):
            depth += 1
            found |= {f"{depth} {k}": v for k, v in frame.f_locals.items() if type(v) is int}
        frame = frame.f_back
    return found


def _parts(one: Any) -> tuple[Any, int]:
    """Return what it iterates over, and the number that it gives next."""
    source, count = one.__reduce__()[1][:2]
    return source, int(count)


def _set(one: Any, count: int) -> bool:
    """Set it to count on from ``count``; return whether it does now."""
    memory = ctypes.c_ssize_t.from_address(id(one) + _AT)
    if memory.value != _parts(one)[1]:
        return False  # another interpreter has it elsewhere
    memory.value = count
    return True
