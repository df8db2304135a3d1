"""Cuts a batch into microbatches of one size: what is missing is filled up with samples whose loss does not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.errors import ScriptError


class BatchCut(NamedTuple):
    """Says where the samples of a batch are. ``size``: samples of each microbatch; ``counts``: how many of these count;
    ``begins``: of each microbatch, in the batch."""

    samples: int
    size: int
    counts: tuple[int, ...]
    begins: tuple[int, ...]

    @classmethod
    def of(cls, samples: int, microbatches: int) -> BatchCut:
        least, more = divmod(samples, microbatches)
        counts = tuple(least + (number < more) for number in range(microbatches))
        begins = tuple(sum(counts[:number]) for number in range(microbatches))
        return cls(samples, max(counts), counts, begins)

    def weight(self, number: int) -> float:
        """Return the share of microbatch ``number`` in the batch's samples."""
        return self.counts[number] / self.samples

    @property
    def even(self) -> bool:
        return min(self.counts) == self.size

    def rows(self) -> Tensor:
        """Return which sample of the batch each place of the microbatches holds."""
        last = self.samples - 1
        places = [
            [min(begin + at, max(begin, begin + count - 1), last) for at in range(self.size)]
            for begin, count in zip(self.begins, self.counts, strict=True)
        ]
        return torch.tensor(places).reshape(-1)

    def filled(self, tensor: Tensor) -> Tensor:
        """Return the microbatches, one behind the other."""
        return tensor if self.even else tensor.index_select(0, self.rows().to(tensor.device))

    def target(self, values: Any, number: int) -> Any:
        """Return what counts of ``values`` in microbatch ``number``."""
        begin = self.begins[number]
        return _sliced(values, begin, begin + self.counts[number])


def _sliced(values: Any, lo: int, hi: int) -> Any:
    if isinstance(values, Tensor):
        return values[lo:hi]
    if isinstance(values, dict):
        return {key: _sliced(value, lo, hi) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_sliced(value, lo, hi) for value in values)
    return values


def samples_of(inputs: Sequence[Any], target: Any) -> int:
    """Return how many samples a batch has. Raises ScriptError: not tensors of as many rows."""
    if not inputs:
        raise ScriptError("model.step() without a batch: give it the inputs of the model's first part")
    for value in inputs:
        if not isinstance(value, Tensor) or not value.dim():
            raise ScriptError(
                f"model.step: inputs of a pipeline are tensors of samples, not {type(value).__name__}; what the "
                "stages need besides is part of their modules"
            )
    samples = {len(value) for value in (*inputs, *_leaves(target))}
    if len(samples) > 1 or not min(samples):
        counts = ", ".join(map(str, sorted(samples)))
        raise ScriptError(f"model.step: inputs and target have different numbers of samples, or none ({counts})")
    return samples.pop()


def _leaves(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values] if values.dim() else []
    if isinstance(values, dict):
        values = list(values.values())
    return [leaf for value in values for leaf in _leaves(value)] if isinstance(values, list | tuple) else []
