"""What a policy is, and which are shipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.model.observation import Observations
from everstep.model.plan import Plan
from everstep.policies.stragglers.backup import backup
from everstep.policies.stragglers.dedicated import dedicated
from everstep.policies.stragglers.nondedicated import nondedicated

Policy = Callable[[Observations, Any], tuple[Plan | None, Any]]


def none(seen: Observations, state: None) -> tuple[Plan | None, None]:
    """Change nothing."""
    return None, None


SHIPPED: dict[str, Policy] = {"none": none, "nondedicated": nondedicated, "dedicated": dedicated, "backup": backup}
