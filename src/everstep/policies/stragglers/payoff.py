"""Judges whether it pays to end a slow process and start another one in its place."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.policies.stragglers.change_detector import step_s


def restart_gain_s(
    paces_s: Sequence[float],
    worst: int,
    normal_s: float,
    shares: Sequence[int],
    restart_s: float,
    remaining_s: float,
    remaining_samples: int = 0,
) -> float:
    """Return seconds that the job ends sooner if its ``worst`` member is replaced by one that takes ``normal_s`` a
    sample.

    ``paces_s``: everybody's seconds per sample; ``shares``: of a step now, () where each goes at its own pace. So many
    ``remaining_samples`` are left; where nobody knows (0), as many as take ``remaining_s`` at today's speed. (A speed
    that was measured is an old one where shares have just changed.) But nobody stays at that: kept or replaced, shares
    will be the best ones. Replacing costs ``restart_s``, in which (at worst) nobody trains. Of n members one of whom is
    s times slower, it pays iff ``restart_s < w * (n / (n - 1 + 1 / s) - 1)``, w what the rest takes a healthy job."""
    if normal_s >= paces_s[worst]:
        return -restart_s
    renewed = [normal_s if i == worst else pace for i, pace in enumerate(paces_s)]
    kept_s, renewed_s = (1 / sum(1 / pace for pace in paces) for paces in (paces_s, renewed))
    now_s = step_s(shares, paces_s) / sum(shares) if sum(shares) else kept_s
    return (remaining_samples or remaining_s / now_s) * (kept_s - renewed_s) - restart_s
