"""What a script needs to test that its job trains what it should."""

from __future__ import annotations

from everstep.testing.witness import Witness

__all__ = ["Witness"]
