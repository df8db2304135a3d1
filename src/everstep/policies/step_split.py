"""Cuts a group's next step out of an epoch, and divides it among the members. Everybody computes the same.

The global batch G: ``elastic``: batch size x members; ``fixed``: batch size x the workers that the job was started
with; with logical workers: batch size x parts, whoever is there. A step takes the next G positions of the epoch; the
last one takes what is left, as plain PyTorch's last batch does. Where that is less than two samples per member (per
part, with logical workers), fewer of them share it, for batch norm cannot do with one sample; the others have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import msgspec

from everstep.config.spec import JobSpec
from everstep.errors import DataError
from everstep.model.group import Micro, Position, StepSplit
from everstep.model.shard import ShardSchedule

_EVEN = StepSplit()


class StepCut(msgspec.Struct, frozen=True):
    """Is one step of a group: positions ``[lo, hi)`` of ``epoch``; ``micros`` by rank; ``lr_factor``: what the learning
    rate is multiplied by in this step (``lr_rule``)."""

    epoch: int
    lo: int
    hi: int
    micros: tuple[tuple[Micro, ...], ...]
    lr_factor: float = 1.0

    @property
    def total(self) -> int:
        return self.hi - self.lo


def cut_step(
    position: Position,
    plan: ShardSchedule,
    until_epoch: int,
    batch_samples: int,
    spec: JobSpec,
    size: int,
    split: StepSplit = _EVEN,
    stop: int = 0,
) -> StepCut | None:
    """Return the step of a group of ``size`` members at ``position``; None: all epochs below ``until_epoch`` are done.
    ``stop``: a position behind the mark's that it must not go beyond; 0: none.

    Raises DataError where an epoch has fewer samples than members, or parts."""
    if position.sample >= plan.samples:
        position = Position(position.step, position.dataset, position.epoch + 1, 0)
    if position.epoch >= until_epoch:
        return None
    parts = spec.logical_workers
    need = parts or size
    total = _total(spec, batch_samples, size)
    if plan.samples < need:
        raise DataError(
            f"an epoch of loader {plan.name!r} has {plan.samples:,} samples, fewer than the {need} "
            f"{'logical workers' if parts else 'workers'} that share it: use fewer, or more data"
        )
    lo, hi = step_range(position.sample, plan.samples, total)
    hi = min(hi, stop) if stop > lo else hi
    shares = split.shares or (1,) * size
    if parts:
        micros = divide_parts(lo, hi, parts, shares, total)
    else:
        micros = divide(lo, hi, shares, batch_samples, total, split.passes)
    return StepCut(position.epoch, lo, hi, micros, rate_of(spec, batch_samples, size, split))


def _total(spec: JobSpec, batch_samples: int, size: int) -> int:
    return batch_samples * (spec.logical_workers or (size if spec.strategy == "elastic" else spec.workers))


def rate_of(spec: JobSpec, batch_samples: int, size: int, split: StepSplit = _EVEN) -> float:
    """Return what the learning rate is multiplied by in the steps of a group of ``size`` members."""
    return lr_factor(spec, _total(spec, batch_samples, size), batch_samples * spec.workers) * split.rate


def step_range(position: int, samples: int, total: int) -> tuple[int, int]:
    """Return the positions of the step at ``position`` < ``samples``: ``total`` of them, or fewer at the end of the
    epoch."""
    return position, min(position + total, samples)


def _sharing(count: int, of: int, total: int) -> int:
    """Return how many of ``of`` members or parts share a step of ``count`` samples, where a full one has ``total``."""
    return of if count >= min(total, 2 * of) else max(1, count // 2)


def divide(
    lo: int, hi: int, shares: tuple[int, ...], limit: int, total: int, passes: tuple[int, ...] = ()
) -> tuple[tuple[Micro, ...], ...]:
    """Return, by rank, the micro-batches of ``[lo, hi)``, contiguous in order of rank, in proportion to ``shares``.

    Each has at most ``limit`` samples; samples that a step has more than ``total`` make a micro-batch larger instead of
    adding one. Where a last step has too few samples (see the top), ranks at the end have one empty micro-batch: they
    compute a neighbour's samples with weight 0, so that they go through the step like everybody else. ``passes``
    (see ``model.group.Split``): a rank that has a number there has so many micro-batches, whatever ``limit`` says."""
    ranges = _divided(hi - lo, shares, limit, total, passes)
    return tuple([tuple([Micro(lo + a, lo + b, -1) for a, b in mine]) for mine in ranges])


@lru_cache(maxsize=64)
def _divided(
    count: int, shares: tuple[int, ...], limit: int, total: int, passes: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """``divide`` of ``[0, count)``, as ranges: nearly every step is divided as the one before it."""
    extra = max(0, count - total)
    passes_of = passes or (0,) * len(shares)
    n = _sharing(count, len(shares), total)
    counts = apportion(count, shares[:n]) + [0] * (len(shares) - n)
    return tuple(
        tuple(_bounds(a, b, min(n, max(1, b - a)) if n > 0 else max(1, -(-max(1, b - a - extra) // limit))))
        for (a, b), n in zip(pairwise(_running(0, counts)), passes_of, strict=True)
    )


def within(micros: tuple[Micro, ...], largest: int) -> tuple[Micro, ...]:
    """Return a member's micro-batches, none of more than ``largest`` samples (0: any): those that are larger in equal
    pieces. Each member does it for itself, for nobody else needs to know. Parts of logical workers stay whole: their
    bits are promised."""
    if largest < 1 or all(m.hi - m.lo <= largest for m in micros):
        return micros
    return tuple(
        piece
        for m in micros
        for piece in ((m,) if m.part >= 0 or m.hi == m.lo else _equal(m.lo, m.hi, -(-(m.hi - m.lo) // largest), -1))
    )


def divide_parts(
    lo: int, hi: int, parts: int, shares: tuple[int, ...], total: int = 0
) -> tuple[tuple[Micro, ...], ...]:
    """Return, by rank, the parts of ``[lo, hi)`` that it holds. Their ranges depend on ``lo, hi, parts, total`` only;
    ranks hold contiguous parts, in proportion to ``shares``. More members than parts: some have an empty one, as some
    parts are in a last step of few samples (see ``divide``)."""
    sharing = _sharing(hi - lo, parts, total)
    whole = _equal(lo, hi, sharing, part=0) + tuple(Micro(hi, hi, part) for part in range(sharing, parts))
    starts = _running(0, apportion(parts, shares))
    return tuple(whole[a:b] if a < b else (Micro(whole[a - 1].hi, whole[a - 1].hi, -1),) for a, b in pairwise(starts))


def apportion(total: int, shares: tuple[int, ...]) -> list[int]:
    """Divide ``total`` whole things in proportion to ``shares`` (largest remainders, lower ranks first); at least one
    each where there are enough."""
    n = len(shares)
    if total < n:
        return [1] * total + [0] * (n - total)
    weight = sum(shares)
    if weight <= 0 or min(shares) < 0:
        shares, weight = (1,) * n, n
    counts = [total * s // weight for s in shares]
    by_remainder = sorted(range(n), key=lambda r: (-(total * shares[r] % weight), r))
    for r in by_remainder[: total - sum(counts)]:
        counts[r] += 1
    for r in range(n):
        if counts[r] == 0:  # taken from who has most
            counts[max(range(n), key=lambda k: (counts[k], -k))] -= 1
            counts[r] = 1
    return counts


def lr_factor(spec: JobSpec, total: int, nominal: int) -> float:
    """Return what ``lr_rule`` makes of a global batch of ``total`` instead of the ``nominal`` one that the job asked
    for."""
    if spec.logical_workers or spec.lr_rule == "none" or total == nominal:
        return 1.0
    ratio = total / nominal
    return ratio if spec.lr_rule == "linear" else float(ratio**0.5)


def _equal(lo: int, hi: int, n: int, part: int) -> tuple[Micro, ...]:
    """Return ``n`` ranges of ``[lo, hi)`` that differ by at most one sample; numbered from ``part`` unless that is
    -1."""
    return tuple(Micro(a, b, part + i if part >= 0 else -1) for i, (a, b) in enumerate(_bounds(lo, hi, n)))


def _bounds(lo: int, hi: int, n: int) -> Iterator[tuple[int, int]]:
    return pairwise([lo + (hi - lo) * i // n for i in range(n + 1)])


def _running(start: int, counts: list[int]) -> list[int]:
    bounds = [start]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds
