"""Keeps buffers of the replicated models (batch norm's running statistics) the same on every member after every step.

Floats: the committed value, plus the mean over the micro-batches (weighted by samples) of what each one changed.
Integers: what the step's first micro-batch made of them. Both travel in the tail of the gradients.

What changes after the vote (a moving average that the script keeps in a buffer, a forward pass behind the step) is
*late*: it is put aside at the end of the iteration, put back at the begin of the next one, and counts as a change
there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from everstep.errors import ScriptError

FLOATS_MAX = 1 << 16
"""Elements of one floating point buffer that the job keeps; larger ones (masks, tables) must not change."""
INTS_MAX = 64
_WORDS = 4  # float32 elements that carry one 64-bit integer, 16 bits each


def each_buffer(models: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Module, str, Tensor]]:
    """Yield every buffer once: the number of its model, its name there, the module that has it, by which key, and
    itself."""
    seen: set[int] = set()
    for i, model in enumerate(models):
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield i, f"{prefix}.{key}" if prefix else key, module, key, buffer


class _Constant(NamedTuple):
    """A buffer that is too large to be averaged: it must not change."""

    full: str
    module: nn.Module
    name: str
    version: int
    digest: bytes


def _digest(buffer: Tensor) -> bytes:
    values = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=16).digest()


class Buffers:
    """Holds all buffers of ``models``. ``tail``: float32 elements that they take."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._floats: list[tuple[nn.Module, str]] = []
        self._ints: list[tuple[nn.Module, str]] = []
        self._constant: list[_Constant] = []
        for _, full, module, name, buffer in each_buffer(models):
            if buffer.is_floating_point() and buffer.numel() <= FLOATS_MAX:
                self._floats.append((module, name))
            elif not buffer.is_floating_point() and not buffer.is_complex() and buffer.numel() <= INTS_MAX:
                self._ints.append((module, name))
            else:
                self._constant.append(_Constant(full, module, name, buffer._version, _digest(buffer)))
        self._float_sizes = [b.numel() for b in self.floats()]
        self._int_sizes = [b.numel() for b in self.ints()]
        self._ints_at = sum(self._float_sizes)
        self.tail = self._ints_at + _WORDS * sum(self._int_sizes)
        self._saved: list[Tensor] = [b.detach().clone() for b in self.floats() + self.ints()]
        self._versions: list[tuple[int, int]] = []
        self._late: list[Tensor] | None = None
        self._middle: list[Tensor] = []  # values at the end of backward
        self._shown: list[tuple[int, int]] | None = None  # versions, where late values are in place between two steps
        self._begun: tuple[list[Tensor], list[Tensor] | None] | None = (
            None  # ``_saved`` and ``_late``, see begin_unsure
        )

    def __repr__(self) -> str:
        return f"<Buffers {len(self._floats)} floats, {len(self._ints)} integers, {len(self._constant)} constant>"

    def _data(self) -> list[Tensor]:
        """To write to: a graph that was built before, and is not run backward yet, has not to know."""
        return [b.data for b in self.floats() + self.ints()]

    def floats(self) -> list[Tensor]:
        return [_get(m, n) for m, n in self._floats]

    def ints(self) -> list[Tensor]:
        return [_get(m, n) for m, n in self._ints]

    def save(self) -> None:
        """Remember the values: those that a step begins with."""
        if not self._saved:
            return
        if self._late is not None and self._shown is not None:
            if self._shown == self._now():
                return  # what is remembered already is everybody's
            self._late = None  # somebody has set other values
        self._shown = None
        with torch.no_grad():
            torch._foreach_copy_(self._saved, self.floats() + self.ints())

    def begin_pass(self) -> None:
        """A micro-batch begins: with what was late in the step before."""
        self._shown = None
        self._middle = []
        if self._late is not None:
            with torch.no_grad():
                torch._foreach_copy_(self._data(), self._late)

    def middle(self) -> None:
        """End the backward pass of a micro-batch that is not the last. What the script changes behind it, it changes
        behind the last one too, where it counts."""
        self._middle = [b.detach().clone() for b in self.floats() + self.ints()]

    def back_to_middle(self) -> None:
        if self._middle:
            with torch.no_grad():
                torch._foreach_copy_(self._data(), self._middle)
            self._middle = []

    def show_late(self) -> None:
        """The loop is over: the script sees what was late, too."""
        if self._late is not None and self._shown is None:
            self.begin_pass()
            self._shown = self._now()

    @property
    def late(self) -> bool:
        return self._late is not None

    def begin_unsure(self) -> None:
        """Keep, from now on, what is committed so that ``roll_back`` may put it back."""
        if self._begun is None:
            self._begun = [saved.clone() for saved in self._saved], self._late

    def discard_undo(self) -> None:
        self._begun = None

    def roll_back(self) -> None:
        """Put all back as when the step began."""
        if self._begun is not None:
            saved, self._late = self._begun
            self._begun = None
            if saved:
                with torch.no_grad():
                    torch._foreach_copy_(self._saved, saved)
        self.restore()

    def restore(self) -> None:
        """Put the saved values back."""
        if not self._saved:
            return
        with torch.no_grad():
            torch._foreach_copy_(self._data(), self._saved)

    def collect(self, tail: Tensor, weight: float, first: bool) -> None:
        """Add what changed since ``save``, times ``weight``, to ``tail`` (float32).

        ``first``: this is the step's first micro-batch: its integers count."""
        self._check_constant()
        if not self._saved:
            return
        at = 0
        with torch.no_grad():
            if weight:
                for now, saved in zip(self.floats(), self._saved, strict=False):
                    change = (now.detach() - saved).to(torch.float32).reshape(-1)
                    tail[at : at + change.numel()].add_(change.to(tail.device), alpha=weight)
                    at += change.numel()
            if first:
                at = self._ints_at
                for now in self.ints():
                    words = _words(now.detach()).to(tail.device)
                    tail[at : at + words.numel()].copy_(words)
                    at += words.numel()

    def collect_late(self, tail: Tensor, weight: float, first: bool) -> None:
        """Collect as ``collect`` does, of what is late."""
        tail.zero_()
        if self._late is not None:
            self.begin_pass()
            self.collect(tail, weight, first)
            self.restore()

    def commit(self, tail: Tensor) -> None:
        """Set the buffers to the saved values changed by ``tail``, summed over all members; these are saved now."""
        if not self._saved:
            return
        with torch.no_grad():
            at = 0
            for saved in self._saved[: len(self._floats)]:
                change = tail[at : at + saved.numel()].view(saved.shape)
                saved.add_(change.to(saved.device, saved.dtype))
                at += saved.numel()
            for saved in self._saved[len(self._floats) :]:
                saved.copy_(_integers(tail[at : at + _WORDS * saved.numel()]).view(saved.shape))
                at += _WORDS * saved.numel()
        self.restore()
        self._late = None
        self._versions = self._now()

    def keep(self) -> None:
        """Keep the values as they are now as the committed ones (of a member alone: nothing to add up)."""
        self._late = self._shown = None
        self.save()
        self._versions = self._now()

    def settle(self) -> None:
        """Put aside, at the end of the iteration, what changed after the commit."""
        if self._saved and self._versions != self._now():
            self._late = [b.detach().clone() for b in self.floats() + self.ints()]
            self.restore()

    def _now(self) -> list[tuple[int, int]]:
        return [(id(b), b._version) for b in self.floats() + self.ints()]

    def _check_constant(self) -> None:
        for i, (full, module, name, version, digest) in enumerate(self._constant):
            buffer = _get(module, name)
            if buffer._version == version:
                continue
            if _digest(buffer) == digest:  # a copy of the state wrote the same values
                self._constant[i] = self._constant[i]._replace(version=buffer._version)
            else:
                raise ScriptError(
                    f"buffer {full!r} with {buffer.numel():,} elements changes in training; on every worker by itself, "
                    f"so the replicas would differ: make it a parameter, or several buffers of at most {FLOATS_MAX:,}"
                )


def _words(integers: Tensor) -> Tensor:
    """Return it as float32 that can be summed with gradients, 16 bits each, least first; on a device without waiting
    for it."""
    if integers.device.type == "cpu":
        words = integers.to(torch.int64).reshape(-1).numpy().view(np.uint16).astype(np.float32)
        return torch.from_numpy(words)
    return words_there(integers)


def words_there(integers: Tensor) -> Tensor:
    wide = integers.to(torch.int64).reshape(-1, 1)
    shifts = torch.arange(0, 16 * _WORDS, 16, device=wide.device)
    return ((wide >> shifts) & 0xFFFF).to(torch.float32).reshape(-1)


def _integers(words: Tensor) -> Tensor:
    """Return int64, as ``_words`` was given them."""
    if words.device.type == "cpu":
        return torch.from_numpy(words.numpy().astype(np.uint16).view(np.int64).copy())
    return integers_there(words)


def integers_there(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 16 * _WORDS, 16, device=words.device)
    return (words.to(torch.int64).reshape(-1, _WORDS) << shifts).sum(1)


def _get(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    if buffer is None:
        raise ScriptError(f"buffer {name!r} of {type(module).__name__} was removed in training")
    return buffer
