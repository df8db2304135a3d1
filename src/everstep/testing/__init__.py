"""Has what a script needs to test that its job trains what it should (``Witness``), and the oracles of the native
store.

``twin`` and ``mirror_twin`` are what ``everstep.native`` does once more, in NumPy and Python: slow, plain, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.testing.witness import Witness

__all__ = ["Witness"]


def __getattr__(name: str) -> Any:
    """``Witness``, which imports torch: the oracles do without."""
    if name == "Witness":
        from everstep.testing.witness import Witness

        return Witness
    raise AttributeError(f"module 'everstep.testing' has no attribute '{name}'")
