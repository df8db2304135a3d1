"""Holds the batches that a script of mode ps has and that no step has consumed. Pure.

One iteration after the other::

    take(work) -> the script computes -> consume() by a step, with all that was kept
                                      -> keep(learnt): a later step will consume it (gradient accumulation)
"""

from __future__ import annotations

from everstep.tables.computed_step import Consumed, samples_of
from everstep.tables.worker_protocol import RangeWork


class BatchesInHand:
    """See the top of this file. ``left``: of the batch that the script is at, what no step has consumed; None: nothing
    is left, or there is no batch."""

    __slots__ = ("_kept", "left")

    def __init__(self) -> None:
        self.left: RangeWork | None = None
        self._kept: list[Consumed] = []  # batches of iterations that are over, in order

    def __repr__(self) -> str:
        return f"<BatchesInHand {len(self._kept)} kept, left {self.left}>"

    @property
    def kept(self) -> bool:
        """Return whether batches of iterations that are over wait for a step."""
        return bool(self._kept)

    @property
    def learnt(self) -> bool:
        """Return whether the script has gradients of the kept batches that are not zeroed."""
        return any(learnt for _, learnt in self._kept)

    @property
    def samples(self) -> int:
        """Return all that no step has consumed."""
        left = self.left
        return samples_of(self._kept) + (0 if left is None else left.hi - left.lo)

    def works(self) -> list[RangeWork]:
        """The kept batches, in the order in which they were handed out."""
        return [work for work, _ in self._kept]

    def take(self, work: RangeWork) -> None:
        """The script's next iteration begins with ``work``."""
        self.left = work

    def keep(self, work: RangeWork, learnt: bool) -> None:
        """The iteration of ``work`` is over without a step. ``learnt``: it has left a gradient."""
        self._kept.append((work, learnt))

    def leave_out(self) -> None:
        """The gradients of the kept batches are gone: nothing will be learnt from them."""
        self._kept = [(work, False) for work, _ in self._kept]

    def take_left(self) -> RangeWork | None:
        """Return what is left of the batch in hand, which is the caller's now."""
        left, self.left = self.left, None
        return left

    def take_kept(self) -> list[Consumed]:
        """The kept batches, which are the caller's now."""
        kept, self._kept = self._kept, []
        return kept
