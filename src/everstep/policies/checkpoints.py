"""Decides when a checkpoint is due, and when it is full: everything, not only what changed."""

from __future__ import annotations


def is_due(every_s: float, every_batches: int, since_s: float, since_batches: int) -> bool:
    """``every_*``: the interval, whichever is not 0; ``since_*``: since the last checkpoint began, or the training."""
    if every_batches:
        return since_batches >= every_batches
    return every_s > 0 and since_s >= every_s


def since_of(newest: int, incrementals: int, full_every: int, full: bool) -> int:
    """Return the checkpoint on which the next one builds; 0: a full one.

    ``newest``: the last one committed by this job (0: none); ``incrementals``: those since its last full one;
    ``full_every``: so many incremental ones, then a full one (the chain that a restore reads stays so short);
    ``full``: one was asked for.
    """
    if full or not newest or incrementals >= full_every:
        return 0
    return newest
