"""Whether it pays to end a slow process and start another one in its place."""

from __future__ import annotations


def restart_pays(members: int, slowness: float, restart_s: float, remaining_s: float) -> bool:
    """One of ``members`` takes ``slowness`` times as long as it should, and ``remaining_s`` of work are left for a
    healthy job. Ending it costs ``restart_s``, in which (at worst) nobody trains; keeping it, with its share made
    smaller, leaves the speed of ``members - 1 + 1/slowness``. So it pays iff

        restart_s < remaining_s * (members / (members - 1 + 1 / slowness) - 1)
    """
    if slowness <= 1.0 or members < 1:
        return False
    return restart_s < remaining_s * (members / (members - 1 + 1 / slowness) - 1)
