"""Says what an exception of a script may come from, and so whether another try may go better."""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.bounds import Whole

Cause = Literal["script", "data", "memory", "device", "node"]
"""``script``: the script itself; every worker would raise it. ``data``: something that was read or called over a
network. ``memory``, ``device``: this process, or its processor or GPU. ``node``: something is missing on this node."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Says why one worker's script raised. ``where``: the error's type and place; the same on every worker if it is the
    script's. ``steps``: how many steps this process had done. ``exit_code``: what the job ends with, if there is no
    other try. ``reached``: the job's step that this process was at, which the master may not know yet; 0: not said (in
    mode ps progress has no steps)."""

    cause: Cause = "script"
    where: str = ""
    steps: Whole = 0
    exit_code: Whole = 1
    reached: Whole = 0


FAILED_MAX_S = 30.0


def pause_s(failures: int) -> float:
    """Return how long the next try waits after so many in a row: what was not there may need a moment."""
    return min(FAILED_MAX_S, 0.5 * 4.0 ** (failures - 1)) if failures > 0 else 0.0
