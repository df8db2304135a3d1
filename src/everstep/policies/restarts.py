"""Decides when to start a lost worker again, when to give up, and when to blame the data."""

from __future__ import annotations


def may_restart(in_a_row: int, max_restarts: int) -> bool:
    """Return whether a slot may be filled again; ``in_a_row``: losses of this slot without a shard done between them,
    this one included."""
    return in_a_row <= max_restarts


def is_poison(workers_lost: int, quarantine_after: int) -> bool:
    """Return whether a shard is to blame; ``workers_lost``: in a row, each while working on the same shard."""
    return quarantine_after > 0 and workers_lost >= quarantine_after
