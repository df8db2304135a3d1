"""The exact split (``exclusive``): worked examples, every small case against trying everything, and what it costs."""

from __future__ import annotations

import itertools
import random

import pytest

from everstep.policies.stragglers.exact import Device, ExactShare, solve, time_s


def longest(devices: list[Device], batch_shares: tuple[ExactShare, ...]) -> float:
    return max(map(time_s, devices, batch_shares))


@pytest.mark.parametrize(
    ("devices", "total", "best_s", "even_s"),
    [
        ([Device(1, 3, 64), Device(2.5, 3, 32)], 128, 98, 166),
        ([Device(1, 2, 64), Device(1, 2, 64), Device(2, 2, 64), Device(4, 2, 32)], 256, 97, 260),
    ],
)
def test_worked_examples(devices: list[Device], total: int, best_s: float, even_s: float) -> None:
    batch_shares = solve(total, devices)
    assert sum(p.samples for p in batch_shares) == total
    assert all(p.batch <= d.memory_batch for p, d in zip(batch_shares, devices, strict=True))
    assert longest(devices, batch_shares) == best_s
    share = total // len(devices)
    passes = [-(-share // d.memory_batch) for d in devices]
    assert max(time_s(d, ExactShare(share, n)) for d, n in zip(devices, passes, strict=True)) == even_s


def test_no_other_split_is_faster() -> None:
    rng = random.Random(5)
    for _ in range(60):
        devices = [Device(rng.randint(1, 5), rng.randint(0, 6), rng.randint(1, 6)) for _ in range(rng.randint(1, 3))]
        total = rng.randint(len(devices), 14)
        every = [
            [ExactShare(n, c) for n in range(1, total + 1) for c in range(1, n + 1) if -(-n // c) <= d.memory_batch]
            for d in devices
        ]
        best = min(
            longest(devices, batch_shares)
            for batch_shares in itertools.product(*every)
            if sum(p.samples for p in batch_shares) == total
        )
        assert longest(devices, solve(total, devices)) == best, (devices, total)


def test_a_step_of_thousands_of_samples_is_divided_at_once() -> None:
    devices = [Device(1 + i % 3, 2, 128) for i in range(16)]
    assert sum(p.samples for p in solve(4096, devices)) == 4096


@pytest.mark.parametrize(("total", "count"), [(0, 1), (2, 3), (1 << 20, 2), (5, 0)])
def test_nothing_to_divide_or_too_much_is_refused(total: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{total} samples for {count} devices"):
        solve(total, [Device(1, 0, 8)] * count)
