"""Decides how many samples of a step each worker takes, in proportion to its speed."""

from __future__ import annotations

from collections.abc import Sequence


def proportional(
    total: int, speeds: Sequence[float], least: Sequence[int] | None = None, most: Sequence[int] | None = None
) -> list[int]:
    """Divide ``total`` samples in proportion to ``speeds`` (samples a second, > 0), in whole numbers of which the
    slowest part is as fast as can be, each within ``[least, most]`` (default: 1, and no limit; ``most`` 0: no limit).

    Raises ValueError where the limits cannot hold ``total``."""
    n = len(speeds)
    low = list(least) if least is not None else [1] * n
    high = [limit or total for limit in most] if most is not None else [total] * n
    if not sum(low) <= total <= sum(high):
        raise ValueError(f"{total} samples for {n} workers that take {sum(low)} to {sum(high)}")
    counts = [0] * n
    free, left = set(range(n)), total
    while free:
        weight = sum(speeds[i] for i in free)
        exact = {i: left * speeds[i] / weight for i in free}
        # Who would go beyond its limit is set to it, and the others divide what is left. First those limits of which
        # the sum is further off: the others may hold by then.
        above = {i for i in free if exact[i] > high[i]}
        below = {i for i in free if exact[i] < low[i]}
        over = sum(exact[i] - high[i] for i in above) - sum(low[i] - exact[i] for i in below)
        fixed = above if above and over >= 0 else below
        if not fixed:
            break
        for i in fixed:
            counts[i] = high[i] if fixed is above else low[i]
            left -= counts[i]
        free -= fixed
    if not free:
        return counts
    weight = sum(speeds[i] for i in free)
    parts = {i: left * speeds[i] / weight for i in free}
    for i, part in parts.items():
        counts[i] = int(part)
    rest = left - sum(counts[i] for i in free)
    for _ in range(rest):  # who has one more done first takes it; of these, who lacks most
        more = (i for i in free if counts[i] < high[i])
        counts[min(more, key=lambda i: ((counts[i] + 1) / speeds[i], counts[i] - parts[i], i))] += 1
    return counts


def even(total: int, members: int) -> list[int]:
    """Divide as evenly as whole numbers can be; the first ones take one more."""
    return [total // members + (i < total % members) for i in range(members)]
