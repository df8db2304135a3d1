"""Parses the setting ``parity``: how many partitions a stripe has, and how many mirrors protect them."""

from __future__ import annotations

import re

import msgspec

from everstep.errors import ConfigError

MAX_K = 16
MAX_M = 2


class ParityCode(msgspec.Struct, frozen=True):
    """``k`` data partitions and ``m`` mirrors a stripe; m = 0: nothing is protected."""

    k: int
    m: int

    def __str__(self) -> str:
        return f"{self.k}+{self.m}" if self.m else "0"

    @property
    def width(self) -> int:
        """Return the number of ps that a full stripe needs."""
        return self.k + self.m if self.m else 1

    def stripes(self, partitions: int) -> int:
        return -(-partitions // self.k)


OFF = ParityCode(1, 0)


def parse_code(text: str) -> ParityCode:
    """Parse ``"4+1"`` -> ParityCode(4, 1); ``"0"`` and ``""`` are off. Raises ConfigError (one line, without the
    field's name)."""
    if text.strip() in ("", "0"):
        return OFF
    match = re.fullmatch(r"\s*(\d{1,4})\+(\d{1,4})\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(
            "expected K+M such as '4+1' (K data partitions and M parity partitions a stripe), or '0' for off"
        )
    k, m = int(match[1]), int(match[2])
    if not 1 <= k <= MAX_K:
        raise ConfigError(f"K = {k}: must be from 1 to {MAX_K}")
    if not 1 <= m <= MAX_M:
        raise ConfigError(f"M = {m}: must be from 1 to {MAX_M} ('0' alone switches parity off)")
    return ParityCode(k, m)


def refuse_few(code: ParityCode, ps: int) -> str:
    """Return one line if ``ps`` servers are too few for this code, else ""."""
    if ps >= code.width:
        return ""
    return f"parity {code} needs at least {code.width} ps, {code.k} for data and {code.m} for parity; not {ps}"
