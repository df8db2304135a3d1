"""Splits samples for evaluation: which train and which are held out; pure, seeded, nothing stored per sample.

Every block of ``BLOCK`` adjacent samples is split by its own keyed permutation: the first part of it trains, the
rest is held out. Counts are exact, the two sides are disjoint and complete, and a reader of adjacent training
samples still reads adjacent places of the source.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import numpy as np

from everstep.data.order import Int64s, make_key, mix64s, permute
from everstep.errors import DataError

BLOCK: Final = 1 << 16


def parse_split(text: str | float | None) -> float:
    """Return the training share in (0, 1] of ``"90/10"``, ``0.9`` or None (all of it); DataError if it is neither."""
    if text is None:
        return 1.0
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)\s*", text)
        if match is None:
            raise DataError(f'split={text!r}: expected "TRAIN/TEST" such as "90/10"')
        train, test = float(match[1]), float(match[2])
        share = train / (train + test) if train + test > 0 else 0.0
    else:
        share = float(text)
    if not 0.0 < share <= 1.0:
        raise DataError(f"split={text!r} leaves no rows to train on: the training share must be above 0, at most 1")
    return share


class DataSplit(msgspec.Struct, frozen=True):
    """Divides the samples ``[0, n)`` of a source into two sides; ``share`` of every block trains."""

    n: int
    share: float = 1.0
    seed: int = 0

    def _train_of(self, rows: int) -> int:
        return round(rows * self.share)

    @property
    def train(self) -> int:
        """Return number of training samples."""
        full, rest = divmod(self.n, BLOCK)
        return full * self._train_of(BLOCK) + self._train_of(rest)

    @property
    def test(self) -> int:
        """Number of samples held out."""
        return self.n - self.train

    def train_samples(self, ranks: Int64s) -> Int64s:
        """Return the sample indices (int64 [m]) of training ranks in ``[0, train)`` (int64 [m])."""
        if self.share == 1.0:
            return ranks
        return self._samples(ranks, self._train_of(BLOCK), 0)

    def test_samples(self, ranks: Int64s) -> Int64s:
        """Sample indices (int64 [m]) of held-out ranks in ``[0, test)`` (int64 [m])."""
        return self._samples(ranks, BLOCK - self._train_of(BLOCK), 1)

    def _samples(self, ranks: Int64s, per_block: int, side: int) -> Int64s:
        full, rest = divmod(self.n, BLOCK)
        if per_block == 0:  # only the short last block can have samples on this side
            block = np.full_like(ranks, full)
        else:
            block = np.minimum(ranks // per_block, full)
        within = ranks - block * per_block
        with np.errstate(over="ignore"):
            keys = mix64s(block.astype(np.uint64) + np.uint64(make_key(self.seed, 0x5711)))
        out = np.empty_like(ranks)
        whole = block < full
        skip_full = self._train_of(BLOCK) if side else 0
        skip_rest = self._train_of(rest) if side else 0
        out[whole] = permute(within[whole] + skip_full, BLOCK, keys[whole])
        if not whole.all():
            out[~whole] = permute(within[~whole] + skip_rest, rest, keys[~whole])
        out += block * BLOCK
        return out
