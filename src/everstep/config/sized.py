"""Names the settings that may be the word auto."""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"
SIZED: Final = ("workers", "ps")
"""Settings that are a number, or ``AUTO``: then everstep finds it."""
