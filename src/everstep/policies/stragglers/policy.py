"""Says what a policy is, and which are shipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from everstep.model.observation import Observations
from everstep.model.plan import Plan
from everstep.policies.auto import auto
from everstep.policies.memory_growth import memory_growth
from everstep.policies.stragglers.backup import backup
from everstep.policies.stragglers.exclusive import exclusive
from everstep.policies.stragglers.shared import shared

Policy = Callable[[Observations, Any], tuple[Plan | None, Any]]


def none(seen: Observations, state: None) -> tuple[Plan | None, None]:
    """Change nothing."""
    return None, None


SHIPPED: dict[str, Policy] = {
    "none": none,
    "shared": shared,
    "exclusive": exclusive,
    "backup": backup,
    "auto": auto,
    "memory": memory_growth,
}


def composed(policies: Sequence[Policy]) -> Policy:
    """Return the policy that asks all of these. The first plan counts; whose plan did not count is asked as before."""
    if len(policies) == 1:
        return policies[0]

    def choose(seen: Observations, state: tuple[Any, ...] | None) -> tuple[Plan | None, tuple[Any, ...]]:
        chosen: Plan | None = None
        states = []
        for policy, before in zip(policies, state or (None,) * len(policies), strict=True):
            plan, after = policy(seen, before)
            states.append(before if plan is not None and chosen is not None else after)
            chosen = chosen or plan
        return chosen, tuple(states)

    return choose
