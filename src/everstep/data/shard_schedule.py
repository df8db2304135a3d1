"""Cuts a dataset into shards: arithmetic only, the same on every worker."""

from __future__ import annotations

from typing import Final

from everstep.errors import DataError
from everstep.model.shard import ShardSchedule

SHARDS_WANTED: Final = 64
"""Shards an epoch aimed at: enough to balance many workers, whatever their number is."""
BATCHES_MAX: Final = 64
"""Batches of one shard at most: what a lost lease can make somebody read again."""


def make_plan(
    name: str, samples: int, batch_size: int, seed: int, drop_last: bool = False, fingerprint: str = ""
) -> ShardSchedule:
    """Cut ``samples`` samples an epoch in shards of whole batches (the last one may be shorter).

    ``drop_last`` cuts the tail of the epoch that does not fill a batch. DataError for a batch size that is no
    positive number or is larger than the data.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise DataError(f"batch_size={batch_size!r} of loader {name!r}: expected a whole number")
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} of loader {name!r}: must be at least 1")
    if samples < 1:
        raise DataError(f"loader {name!r} has no rows to train on")
    if batch_size > samples:
        raise DataError(f"batch_size={batch_size} of loader {name!r} is larger than its {samples:,} training rows")
    if drop_last:
        samples -= samples % batch_size
    batches = -(-samples // batch_size)
    per_shard = max(1, min(BATCHES_MAX, batches // SHARDS_WANTED))
    return ShardSchedule(
        name=name, samples=samples, shard_samples=per_shard * batch_size, seed=seed, fingerprint=fingerprint
    )
