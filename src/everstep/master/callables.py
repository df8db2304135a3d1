"""Loads what a job's settings name as ``module:callable``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def load_callable(name: str, folder: Path) -> Any:
    """Return the callable of ``module:callable``, found in ``folder`` or where Python finds modules. Raises what
    importing raises, AttributeError, TypeError: it is no callable."""
    module, _, attribute = name.partition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    found = getattr(importlib.import_module(module), attribute)
    if not callable(found):
        raise TypeError(f"{name} is {type(found).__name__}, not a callable")
    return found
