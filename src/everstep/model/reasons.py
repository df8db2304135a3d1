"""Has the enums for why something is done, where code goes by it. Sentences are made of them in ``model.words``.

``Decision.action``, ``Decision.reason``, ``error`` and the like are for people: code hands them on and never compares
them (``tests/model/test_no_steering_by_prose.py``). Journals, dumps of the brain and audit logs hold an enum's value.
What an earlier release wrote instead is mapped in ``_EARLIER``, and nowhere else.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Is the base of the enums here: it reads what earlier releases wrote, too."""

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        name = _EARLIER.get((cls.__name__, str(value)))
        return cls[name] if name is not None else None


class CheckpointReason(Reason):
    """Says why a checkpoint is taken."""

    ASKED = "asked"
    DUE = "due"
    RECLAIM = "reclaim"
    """Those who have the state are about to leave."""
    LAST_REPLICA = "last replica"
    """Mode allreduce: one worker is left that has the state."""
    FINAL = "final"
    """A job with checkpoints ends with one."""
    STOP = "stop"
    """The job is asked to stop, and stops with one."""
    LATE = "late"
    """None is taken: the one in progress has taken too long, and is given up."""


class LeaveReason(Reason):
    """Says why a worker leaves its group. ``STAYS`` is false: it does not."""

    STAYS = ""
    DONE = "done"
    """Its script has come to its end."""
    ASKED = "asked"
    """It was told to end, or its loop ended early."""


class Arrival(Reason):
    """Says how a ps came by a partition."""

    NEW = "new"
    """Empty, at the beginning of the job."""
    PROMOTED = "promoted"
    """It kept a copy."""
    REBUILT = "rebuilt"
    """From parity."""
    LOADED = "loaded"
    """From a snapshot of a checkpoint."""
    RESUMED = "resumed"
    """It was to give the partition away, and keeps it: the new owner was lost."""
    BEGUN = "begun"
    """Empty, after all that it had was lost."""
    KEPT = "kept"
    """It had the partition already."""
    STUCK = "stuck"
    """It has no way to get the partition."""


_EARLIER = {
    ("CheckpointReason", "one healthy replica is left"): "LAST_REPLICA",
    ("LeaveReason", "it wants to leave"): "ASKED",
}
"""What an earlier release wrote: (enum, value) -> name."""
