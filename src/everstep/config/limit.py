"""Parses limits of time that may be off: ``progress_timeout``."""

from __future__ import annotations

from everstep.errors import ConfigError
from everstep.units import seconds

LEAST_S = 1.0
MOST_S = 30 * 86_400.0


def parse_limit(text: str, what: str) -> float:
    """Parse ``"10m"`` -> 600.0; ``"off"`` -> 0.0. Raises ConfigError that names ``what``."""
    if text.strip().lower() == "off":
        return 0.0
    try:
        span = seconds(text)
    except ConfigError:
        raise ConfigError(f"{what} = {text!r}: expected a span such as '30s' or '10m', or off") from None
    if not LEAST_S <= span <= MOST_S:
        raise ConfigError(f"{what} = {text!r}: must be from {LEAST_S:g} s to 30d, or off")
    return span
