"""Says of the saved state of an optimizer what a job with tables on ps asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_STATE = (
    "{}: the saved state has momenta of an optimizer, which the ps can not be given: go on by everstep resume, begin "
    "with a fresh optimizer (leave the state out), or train with --mode allreduce"
)


def has_momenta(saved: Mapping[str, Any]) -> bool:
    """Return whether the ``state_dict`` of an optimizer has state of any parameter."""
    return any(saved.get("state", {}).values())
