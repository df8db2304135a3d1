"""Parses and prints sizes and spans of time as people write them: ``30s``, ``10m``, ``64MiB``."""

from __future__ import annotations

import re

from everstep.errors import ConfigError

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _split(text: str, what: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None:
        raise ConfigError(f"{what} {text!r} is not a number with a unit")
    return float(match.group(1)), match.group(2)


def seconds(text: str) -> float:
    """Parse ``"30s"`` -> 30.0; a bare number is seconds. Raises ConfigError."""
    number, unit = _split(text, "time span")
    if unit and unit not in _SECONDS:
        raise ConfigError(f"time span {text!r}: unit {unit!r} is not one of {', '.join(_SECONDS)}")
    return number * _SECONDS.get(unit, 1.0)


def size_bytes(text: str) -> int:
    """Parse ``"64MiB"`` -> 67108864; a bare number is bytes. Raises ConfigError."""
    number, unit = _split(text, "size")
    if unit and unit.lower() not in _BYTES:
        raise ConfigError(f"size {text!r}: unit {unit!r} is not one of B, KB, MB, GB, KiB, MiB, GiB")
    return int(number * _BYTES.get(unit.lower(), 1))


def human_bytes(n: float) -> str:
    """Return a size in words: 67108864 -> ``"64.0 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
