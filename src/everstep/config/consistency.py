"""Says how far the workers of mode ps may be apart: ``consistency`` of the job, as text and as numbers.

``async``: they never wait for each other. ``bounded:S``: none begins a batch while the slowest is more than S batches
behind. ``sync``: all go step by step; each step is the mean over everybody's samples, computed from the same
parameters. ``sync:B``: a step waits for all but the B slowest, whose samples somebody computes again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_AHEAD = 1_000_000  # batches: more is async


class Consistency(NamedTuple):
    """Is a parsed ``consistency``. ``backup``: B of sync:B, else 0."""

    kind: str
    ahead: int = 0
    backup: int = 0

    def __str__(self) -> str:
        number = self.ahead if self.kind == "bounded" else self.backup
        return f"{self.kind}:{number}" if number else self.kind


def parse_consistency(text: str) -> Consistency:
    """Raises ValueError with the reason, part of a line."""
    kind, colon, number = text.partition(":")
    if kind not in ("async", "bounded", "sync") or (kind == "async" and colon):
        raise ValueError("expected async, bounded:S (at most S batches ahead of the slowest), sync, or sync:B")
    if not colon:
        if kind == "bounded":
            raise ValueError("expected bounded:S, such as bounded:4 (batches ahead of the slowest worker)")
        return Consistency(kind)
    if not re.fullmatch(r"[0-9]{1,7}", number) or int(number) > MAX_AHEAD:
        what = "batches ahead of the slowest worker" if kind == "bounded" else "workers that a step does not wait for"
        raise ValueError(f"expected a whole number of {what} up to {MAX_AHEAD} after {kind}:")
    if kind == "sync":
        return Consistency(kind, backup=int(number))
    if int(number) == 0:
        raise ValueError("nobody ahead of anybody is consistency sync, which also takes each step as one: use sync")
    return Consistency(kind, ahead=int(number))
