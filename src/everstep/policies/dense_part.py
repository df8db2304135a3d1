"""Says how the dense part of a model outlives a lost ps (decision 0317).

It is on the ps in mode ps alone. There parity does not add it up over a stripe: each mirror has the dense rows of its
partitions whole.
"""

from __future__ import annotations


def dense_words(group: bool, lags: bool, mirrors: int) -> str:
    """Return how, in words; "": nothing is protected. ``group``: workers train in a group, and each has the dense part;
    ``lags``: mirrors may be behind; ``mirrors``: that a partition has."""
    if not mirrors:
        return ""
    if group:
        return "the dense part needs no mirror: every worker has it"
    at = f"at {mirrors} mirror{'s' if mirrors > 1 else ''}"
    return f"the dense part is whole {at}, " + ("sent once a lag" if lags else "which repeat its updates")
