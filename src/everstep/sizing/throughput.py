"""Computes samples/s for any number of workers and ps, from one probe with one worker and, where there is one, a probe
with two.

Workers that have cores of their own add up. Those of one machine share its cores. Up to the workers of the second
probe the rate goes straight from probe to probe. Beyond, each worker brings what a worker of that probe brought, until
the machine's cores are all busy: ``cores`` over the processor seconds of a sample, at workers and ps together. Without
a second probe the turn between the two limits is a smooth one (``_soft_min``). Each further ps costs requests of its
own: it adds ``ps_growth`` of the ps' processor time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from everstep.sizing.probe_readings import ProbeRun

_SHARP: Final = 4.0  # the exponent n: how sudden the turn from one limit to the other is
_GROWTH_MAX: Final = 0.5
_UNPROBED: Final = 0.10  # relative error where the law goes beyond what was probed, from the benchmark "estimate"
_FAR: Final = 0.25  # ... and with machines or more than twice the workers that were probed
_PROBED: Final = 0.05  # a machine's own noise from run to run


class PredictedRate(NamedTuple):
    """Says samples/s with a relative error, and the share of the machines' cores that is busy then."""

    samples_per_s: float
    error: float
    busy: float
    measured: bool  # probed with these very numbers


class ThroughputLaw:
    """Is the law at the top of this file, fitted to probes of the same script."""

    def __init__(self, probes: Sequence[ProbeRun]) -> None:
        """Take ``probes``: one with one worker first. Raises ValueError if it has measured nothing."""
        if not probes or probes[0].samples_per_s <= 0:
            raise ValueError("no probe has measured a rate")
        self.probes = tuple(probes)
        self._one = one = probes[0]
        two = next((p for p in probes if p.workers > one.workers and p.samples_per_s > 0), None)
        self._two = two
        self.cores = one.cores
        self.ps_growth = 0.0
        self._worker_cpu_s, self._ps_cpu_s = one.worker_cpu_s, one.ps_cpu_s
        if two is None:
            return
        if two.ps > one.ps and one.ps_cpu_s > 0 and one.worker_cpu_s > 0 and two.worker_cpu_s > 0:
            # What the cores' sharing costs makes both roles slower alike; what is left of the ps' is its requests. A
            # worker may also take less than alone: the threads of one that has all cores wait busily.
            grown = (two.ps_cpu_s / one.ps_cpu_s) / max(1.0, two.worker_cpu_s / one.worker_cpu_s)
            self.ps_growth = min(_GROWTH_MAX, max(0.0, grown - 1.0) / (two.ps - one.ps))
        self._worker_cpu_s = two.worker_cpu_s
        self._ps_cpu_s = two.ps_cpu_s / (1 + self.ps_growth * (two.ps - one.ps))

    def __repr__(self) -> str:
        return f"<ThroughputLaw {self._one.samples_per_s:,.0f}/s alone, {self.shared:,.0f}/s with all cores busy>"

    @property
    def shared(self) -> float:
        """Return samples/s of one machine whose cores are all busy, with the ps of the first probe."""
        cpu_s = self.cpu_s(self._one.ps)
        return self.cores / cpu_s if cpu_s > 0 else math.inf

    def _carried(self, each: float) -> float:
        """Return samples/s of a machine with ``each`` workers and the ps of the first probe."""
        one, two = self._one, self._two
        alone = each * one.samples_per_s / one.workers
        if each <= one.workers:
            return alone
        if two is None:
            return _soft_min(alone, self.shared)
        rate = two.samples_per_s / self._of_ps(two.ps)
        if each <= two.workers:
            share = (each - one.workers) / (two.workers - one.workers)
            return one.samples_per_s + share * (rate - one.samples_per_s)
        return min(each * rate / two.workers, max(self.shared, rate))

    def cpu_s(self, ps: int) -> float:
        """Return the processor seconds of a sample with so many ps, at workers and ps together."""
        return self._worker_cpu_s + self._ps_cpu_s * (1 + self.ps_growth * max(0, ps - self._one.ps))

    def _of_ps(self, ps: int) -> float:
        """Return the factor on all rates that so many ps have instead of those of the first probe."""
        own = self.cpu_s(self._one.ps)
        return own / self.cpu_s(ps) if own > 0 else 1.0

    def rate(self, workers: int, ps: int, machines: int = 1) -> PredictedRate:
        """Return the rate of ``workers`` spread evenly over ``machines`` machines of this kind. The network between
        machines is not counted."""
        value = self._carried(workers / machines) * self._of_ps(ps)
        for probe in self.probes:
            if machines == 1 and (probe.workers, probe.ps) == (workers, ps):
                busy = probe.samples_per_s * (probe.worker_cpu_s + probe.ps_cpu_s) / self.cores
                return PredictedRate(probe.samples_per_s, max(_PROBED, 2 * probe.spread), min(1.0, busy), True)
        far = machines > 1 or workers > 2 * self.probes[-1].workers
        spread = max(p.spread for p in self.probes)
        error = math.hypot(_FAR if far else _UNPROBED, 2 * spread)
        return PredictedRate(value * machines, error, min(1.0, value * self.cpu_s(ps) / self.cores), False)


def _soft_min(a: float, b: float) -> float:
    if math.isinf(b):
        return a
    low, high = min(a, b), max(a, b)
    return float(low * (1 + (low / high) ** _SHARP) ** (-1 / _SHARP))
