"""How a group's next step is cut out of an epoch, and divided among its members. Everybody computes the same.

The global batch G: ``elastic``: batch size x members; ``fixed``: batch size x the workers that the job was started
with; with logical workers: batch size x parts, whoever is there. A step takes the next G positions of the epoch; the
last one takes what is left, and a remainder smaller than two samples per member (per part, with logical workers) joins
the step before it, so that everybody has at least two samples: batch norm cannot do with one. (A group that grew in
mid-epoch may still meet a remainder smaller than itself: then some members have none, see ``divide``.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import msgspec

from everstep.config.spec import JobSpec
from everstep.errors import DataError
from everstep.model.group import Mark, Micro, Split
from everstep.model.shard import Plan

_EVEN = Split()


class Cut(msgspec.Struct, frozen=True):
    """One step of a group: positions ``[lo, hi)`` of ``epoch``; ``micros`` by rank; ``lr_factor``: what the learning
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
    mark: Mark,
    plan: Plan,
    until_epoch: int,
    batch_samples: int,
    spec: JobSpec,
    size: int,
    split: Split = _EVEN,
    stop: int = 0,
) -> Cut | None:
    """The step of a group of ``size`` members at ``mark``; None: all epochs below ``until_epoch`` are done. ``stop``:
    a position behind the mark's that it must not go beyond; 0: none.

    Raises DataError where an epoch has fewer samples than members, or parts."""
    if mark.position >= plan.samples:
        mark = Mark(mark.step, mark.dataset, mark.epoch + 1, 0)
    if mark.epoch >= until_epoch:
        return None
    parts = spec.logical_workers
    need = parts or size
    total = batch_samples * (parts or (size if spec.strategy == "elastic" else spec.workers))
    if plan.samples < need:
        raise DataError(
            f"an epoch of loader {plan.name!r} has {plan.samples:,} samples, fewer than the {need} "
            f"{'logical workers' if parts else 'workers'} that share it: use fewer, or more data"
        )
    lo, hi = step_range(mark.position, plan.samples, total, need)
    hi = min(hi, stop) if stop > lo else hi
    shares = split.shares or (1,) * size
    if parts:
        micros = divide_parts(lo, hi, parts, shares)
    else:
        micros = divide(lo, hi, shares, batch_samples, total, split.passes)
    return Cut(mark.epoch, lo, hi, micros, lr_factor(spec, total, batch_samples * spec.workers) * split.rate)


def step_range(position: int, samples: int, total: int, need: int) -> tuple[int, int]:
    """Positions of the step at ``position`` < ``samples``: ``total`` of them; fewer or, where less than twice ``need``
    would be left behind it, more at the end of the epoch."""
    hi = position + total
    return (position, samples) if samples - hi < 2 * need else (position, hi)


def divide(
    lo: int, hi: int, shares: tuple[int, ...], limit: int, total: int, passes: tuple[int, ...] = ()
) -> tuple[tuple[Micro, ...], ...]:
    """By rank: the micro-batches of ``[lo, hi)``, contiguous in order of rank, in proportion to ``shares``.

    Each has at most ``limit`` samples; the samples that a last step has more than ``total`` (see the top) make a
    micro-batch larger instead of adding one. With fewer samples than members some ranks have one empty micro-batch:
    they compute a neighbour's sample with weight 0, so that they go through the step like everybody else. ``passes``
    (see ``model.group.Split``): a rank that has a number there has so many micro-batches, whatever ``limit`` says."""
    ranges = _divided(hi - lo, shares, limit, total, passes)
    return tuple([tuple([Micro(lo + a, lo + b, -1) for a, b in mine]) for mine in ranges])


@lru_cache(maxsize=64)
def _divided(
    count: int, shares: tuple[int, ...], limit: int, total: int, passes: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """``divide`` of ``[0, count)``, as ranges: nearly every step is divided as the one before it."""
    extra = max(0, count - total)
    told = passes or (0,) * len(shares)
    return tuple(
        tuple(_bounds(a, b, min(n, max(1, b - a)) if n > 0 else max(1, -(-max(1, b - a - extra) // limit))))
        for (a, b), n in zip(pairwise(_running(0, apportion(count, shares))), told, strict=True)
    )


def within(micros: tuple[Micro, ...], largest: int) -> tuple[Micro, ...]:
    """A member's micro-batches, none of more than ``largest`` samples (0: any): those that are larger in equal pieces.
    Each member does it for itself, for nobody else needs to know. Parts of logical workers stay whole: their bits are
    promised."""
    if largest < 1 or all(m.hi - m.lo <= largest for m in micros):
        return micros
    return tuple(
        piece
        for m in micros
        for piece in ((m,) if m.part >= 0 or m.hi == m.lo else _equal(m.lo, m.hi, -(-(m.hi - m.lo) // largest), -1))
    )


def divide_parts(lo: int, hi: int, parts: int, shares: tuple[int, ...]) -> tuple[tuple[Micro, ...], ...]:
    """By rank: the parts of ``[lo, hi)`` that it holds. The parts' ranges depend on ``lo, hi, parts`` only; ranks hold
    contiguous parts, in proportion to ``shares``. More members than parts: some have an empty one (see ``divide``)."""
    whole = _equal(lo, hi, parts, part=0)
    starts = _running(0, apportion(parts, shares))
    return tuple(whole[a:b] if a < b else (Micro(whole[a - 1].hi, whole[a - 1].hi, -1),) for a, b in pairwise(starts))


def apportion(total: int, shares: tuple[int, ...]) -> list[int]:
    """``total`` whole things in proportion to ``shares`` (largest remainders, lower ranks first); at least one each
    where there are enough."""
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
    """What ``lr_rule`` makes of a global batch of ``total`` instead of the ``nominal`` one that the job asked for."""
    if spec.logical_workers or spec.lr_rule == "none" or total == nominal:
        return 1.0
    ratio = total / nominal
    return ratio if spec.lr_rule == "linear" else float(ratio**0.5)


def _equal(lo: int, hi: int, n: int, part: int) -> tuple[Micro, ...]:
    """``n`` ranges of ``[lo, hi)`` that differ by at most one sample; numbered from ``part`` unless that is -1."""
    return tuple(Micro(a, b, part + i if part >= 0 else -1) for i, (a, b) in enumerate(_bounds(lo, hi, n)))


def _bounds(lo: int, hi: int, n: int) -> Iterator[tuple[int, int]]:
    return pairwise([lo + (hi - lo) * i // n for i in range(n + 1)])


def _running(start: int, counts: list[int]) -> list[int]:
    bounds = [start]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds
