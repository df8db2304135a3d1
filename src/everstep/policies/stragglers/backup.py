"""Has ``backup``: a step waits for all but the slowest few workers."""

from __future__ import annotations

from everstep.model.decision import Decision
from everstep.model.observation import Observations
from everstep.model.plan import BackupWorkers, Plan
from everstep.policies.stragglers.slow import judge

MOST = 0.25  # of the workers


def backup(seen: Observations, state: int | None) -> tuple[Plan | None, int]:
    """Ask for as many backup workers as are slow now, at most a quarter. ``state``: how many there are."""
    now = seen.backup if state is None else state
    slow = [verdict for verdict in judge(seen.workers) if verdict.slow]
    wanted = min(len(slow), int(MOST * len(seen.workers)))
    if wanted == now:
        return None, now
    names = ", ".join(f"worker:{verdict.slot} {verdict.slowness:.1f}x" for verdict in slow)
    why = Decision("backup workers", f"slow: {names or 'nobody'}", {"backup": wanted, "before": now})
    return Plan(actions=(BackupWorkers(backup=wanted),), decision=why), wanted
