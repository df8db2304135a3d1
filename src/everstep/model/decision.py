"""Why something was done: kept with every instruction that is not routine, shown by ``everstep explain``."""

from __future__ import annotations

import msgspec


class Decision(msgspec.Struct, frozen=True):
    """Is one choice: what, why in words, the inputs used, and what was not done instead."""

    action: str
    reason: str
    inputs: dict[str, str | int | float | bool] = {}
    rejected: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.action}: {self.reason}"
