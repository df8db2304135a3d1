"""Parses ``checkpoint_every``: an interval in time or in batches."""

from __future__ import annotations

import re
from typing import NamedTuple

from everstep.errors import ConfigError
from everstep.units import seconds

MIN_EVERY_S = 1.0


class Every(NamedTuple):
    """An interval between the beginnings of two checkpoints: whichever of the two is not 0."""

    seconds: float = 0.0
    batches: int = 0

    @property
    def never(self) -> bool:
        return not self.seconds and not self.batches

    def __str__(self) -> str:
        if self.never:
            return "only when asked"
        return f"every {self.batches} batches" if self.batches else f"every {self.seconds:g} s"


def parse_every(text: str, what: str = "checkpoint_every") -> Every:
    """Parse ``"30s"``, ``"10m"``, ``"10000batches"``; "" is never. Raises ConfigError that names ``what``."""
    if not text:
        return Every()
    match = re.fullmatch(r"\s*(\d+)\s*batch(?:es)?\s*", text)
    if match is not None:
        if int(match[1]) < 1:
            raise ConfigError(f"{what} = {text!r}: must be at least 1 batch")
        return Every(batches=int(match[1]))
    try:
        span = seconds(text)
    except ConfigError:
        raise ConfigError(f"{what} = {text!r}: expected a span such as '30s' or '10m', or '10000batches'") from None
    if span < MIN_EVERY_S:
        raise ConfigError(f"{what} = {text!r}: must be at least {MIN_EVERY_S:g} s")
    return Every(seconds=span)
