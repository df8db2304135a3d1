"""Describes what a running job has seen of machines that are taken back, and what its spot policy chose for that."""

from __future__ import annotations

import msgspec

from everstep.bounds import Members, Seconds, Whole


class ReclaimsSeen(msgspec.Struct, frozen=True, array_like=True):
    """Counts what was seen of machines that may be taken back. ``held_s``: machine-seconds; ``reclaims``: machines that
    were taken back; ``moments``: at which that was, and ``shared`` of them took more than one machine; ``most``:
    machines that one moment took, at most."""

    held_s: Seconds = 0.0
    reclaims: Whole = 0
    moments: Whole = 0
    shared: Whole = 0
    most: Whole = 0


class SpotChoice(msgspec.Struct, frozen=True, array_like=True):
    """Is what the spot policy of a job chose last. ``interval_s``: between two checkpoints, 0.0: nothing was chosen
    yet; ``parity``: that the policy calls for, "": it says nothing of it; ``safe_ps``: ps that belong on machines that
    stay; ``why``: one line; ``seen``: by what. ``failed``: why the policy is asked no more, "": it is."""

    interval_s: Seconds = 0.0
    parity: str = ""
    safe_ps: Members = 0
    why: str = ""
    seen: ReclaimsSeen = ReclaimsSeen()
    failed: str = ""
