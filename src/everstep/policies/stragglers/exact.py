"""Finds the exact split of a step over members of different speed and memory (the problem of the *exclusive* policy).

Member i computes ``samples[i]`` in ``passes[i]`` micro-batches, as alike as whole numbers can be, which takes it
``passes * overhead + per_sample * samples`` seconds. Wanted: the smallest largest time, so that all together have
exactly ``total`` samples and no micro-batch is larger than fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

MAX_TOTAL = 1 << 14


class Device(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Describes a device: ``per_sample_s`` > 0 and ``overhead_s`` >= 0 seconds; ``memory_batch``: largest micro-batch
    that fits, >= 1."""

    per_sample_s: float
    overhead_s: float
    memory_batch: int


class ExactShare(msgspec.Struct, frozen=True, array_like=True):
    samples: int
    passes: int

    @property
    def batch(self) -> int:
        """Samples of the largest pass."""
        return -(-self.samples // self.passes)


def time_s(device: Device, batch_share: ExactShare) -> float:
    return batch_share.passes * device.overhead_s + device.per_sample_s * batch_share.samples


def whole(samples: int, memory_batch: int) -> ExactShare:
    """Take in as few passes as fit; more would only cost more."""
    return ExactShare(samples, -(-samples // memory_batch))


def solve(total: int, devices: Sequence[Device]) -> tuple[ExactShare, ...]:
    """Return the optimal portion of each device; every device has at least one sample. Raises ValueError where there is
    nothing to divide, or too much (``MAX_TOTAL``)."""
    if not devices or not len(devices) <= total <= MAX_TOTAL:
        raise ValueError(f"{total} samples for {len(devices)} devices: must be {len(devices)} to {MAX_TOTAL}")
    kinds = {device: _cheapest(total - len(devices) + 1, device) for device in sorted(set(devices))}
    times = sorted({cost for costs in kinds.values() for cost, _ in costs.values()})
    # All that is reached in some time is reached in more: the smallest time that is enough is found by halving.
    first = bisect_left(times, True, key=lambda limit: bool(_reached(total, devices, kinds, limit)[-1] >> total & 1))
    if first == len(times):
        raise ValueError(f"{total} samples cannot be divided among {len(devices)} devices")
    limit = times[first]
    reached = _reached(total, devices, kinds, limit)
    batch_shares: list[ExactShare] = []
    left = total
    for i in range(len(devices) - 1, -1, -1):
        # of all that work out, what takes this device the shortest: nobody is kept busier than needed
        fits = (
            (cost, n, batch_share)
            for n, (cost, batch_share) in kinds[devices[i]].items()
            if cost <= limit and n <= left and reached[i] >> (left - n) & 1
        )
        _, n, batch_share = min(fits, key=lambda item: item[:2])
        batch_shares.append(batch_share)
        left -= n
    return tuple(reversed(batch_shares))


def _cheapest(most: int, device: Device) -> dict[int, tuple[float, ExactShare]]:
    """Return, by number of samples up to ``most``, ascending, the shortest time in which the device computes so many,
    and how."""
    batch_shares = (whole(n, device.memory_batch) for n in range(1, most + 1))
    return {batch_share.samples: (time_s(device, batch_share), batch_share) for batch_share in batch_shares}


def _reached(
    total: int,
    devices: Sequence[Device],
    kinds: Mapping[Device, Mapping[int, tuple[float, ExactShare]]],
    limit_s: float,
) -> list[int]:
    """Return, by number of devices used, the sums that they can have within ``limit_s``, as bits."""
    mask = (1 << total + 1) - 1
    sums = [1]
    counts = {device: [n for n, (cost, _) in costs.items() if cost <= limit_s] for device, costs in kinds.items()}
    for device in devices:
        sums.append(_plus(sums[-1], counts[device]) & mask)
    return sums


def _plus(sums: int, counts: list[int]) -> int:
    """Each of ``sums`` (bits) plus each of ``counts`` (ascending): runs of counts are added by doubling."""
    out, i = 0, 0
    while i < len(counts):
        j = i
        while j + 1 < len(counts) and counts[j + 1] == counts[j] + 1:
            j += 1
        run, width, length = sums << counts[i], 1, j - i + 1
        while width < length:
            step = min(width, length - width)
            run |= run << step
            width += step
        out |= run
        i = j + 1
    return out
