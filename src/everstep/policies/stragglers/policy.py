"""Says what a policy is, and which are shipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.model.observation import Observations
from everstep.model.plan import Plan
from everstep.policies.stragglers.backup import backup
from everstep.policies.stragglers.exclusive import exclusive
from everstep.policies.stragglers.shared import shared

Policy = Callable[[Observations, Any], tuple[Plan | None, Any]]


def none(seen: Observations, state: None) -> tuple[Plan | None, None]:
    """Change nothing."""
    return None, None


SHIPPED: dict[str, Policy] = {"none": none, "shared": shared, "exclusive": exclusive, "backup": backup}
