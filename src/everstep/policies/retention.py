"""Decides which checkpoints are kept, and which files can go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from everstep.model.snapshot import Manifest


class CheckpointTaken(NamedTuple):
    """Is a checkpoint and when it was taken, in seconds since the epoch."""

    checkpoint: int
    at: float


def to_drop(taken: Sequence[CheckpointTaken], keep_last: int, keep_every_s: float = 0.0) -> tuple[int, ...]:
    """Return the checkpoints that need not be kept, ascending. Kept are the ``keep_last`` newest (at least one) and,
    where ``keep_every_s`` > 0, the first of every stretch of so many seconds: once kept so, it stays, whatever comes
    after.
    """
    ordered = sorted(taken)
    kept = {t.checkpoint for t in ordered[-max(1, keep_last) :]}
    if keep_every_s > 0:
        first: dict[int, CheckpointTaken] = {}
        for t in ordered:
            first.setdefault(int(t.at // keep_every_s), t)
        kept |= {t.checkpoint for t in first.values()}
    return tuple(t.checkpoint for t in ordered if t.checkpoint not in kept)


def unneeded_files(dropped: Iterable[Manifest], kept: Iterable[Manifest]) -> set[str]:
    """Return the paths of files of ``dropped`` checkpoints that no ``kept`` one needs; incremental snapshots need all
    before them."""
    return _files(dropped) - _files(kept)


def _files(manifests: Iterable[Manifest]) -> set[str]:
    return {file.path for manifest in manifests for file in manifest.files()}
