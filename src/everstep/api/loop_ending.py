"""Says why a loop of mode ps ends before its data does."""

from __future__ import annotations

from everstep.errors import EverstepError


class LoopEnding:
    """Is what all waits of a worker look at. Any thread sets it. ``stopping``: the loop ends the script after the batch
    in hand, with ``exit_status``; ``job_over``: for nobody is waited any more."""

    __slots__ = ("exit_status", "failure", "job_over", "stopping")

    def __init__(self) -> None:
        self.failure: EverstepError | None = None
        self.job_over = self.stopping = False
        self.exit_status = 0

    def __repr__(self) -> str:
        return f"<LoopEnding {self.failure or ('stopping' if self.stopping else 'none')}>"

    @property
    def over(self) -> bool:
        """Return whether nothing will be acknowledged any more."""
        return self.job_over or self.failure is not None

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self.failure
