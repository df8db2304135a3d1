"""Decides when a node takes in a neighbour's copy, so that its own stages do not pay for it: pure.

A copy on its way costs both ends. The sender begins each block inside of a wait of its stage. The receiver takes each
block inside of a wait of its own: one of its node's stages is idle, so its core is free, and what is left of the wait
has room for the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SHARE: Final = 0.8
"""Of a wait's usual length: so much of it may be used, since its length varies."""


class StageNow(NamedTuple):
    """Is what a stage does at this moment. ``waits_since_s``: begin of the wait that it is in, below 0: it computes;
    ``usual_s``: how long that wait lasts usually, 0: not known yet."""

    waits_since_s: float
    usual_s: float = 0.0

    def left_s(self, now_s: float) -> float:
        """Return how much longer the wait may be used; 0: not at all."""
        if self.waits_since_s < 0:
            return 0.0
        if self.usual_s <= 0:
            return float("inf")
        return max(0.0, self.waits_since_s + SHARE * self.usual_s - now_s)


def has_room(stages: Sequence[StageNow], now_s: float, block_s: float) -> bool:
    """Return whether a block may be taken in now, by the stages of the receiver's node. ``block_s``: what a block costs
    there. A node without stages always has room."""
    return not stages or any(stage.left_s(now_s) > block_s for stage in stages)
