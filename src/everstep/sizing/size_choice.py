"""Chooses the size of a job: workers, ps, machines and threads, from a fitted law, bounds, a deadline and a budget."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import msgspec

from everstep.config.parity import OFF, ParityCode
from everstep.errors import ConfigError
from everstep.sizing.memory import ps_memory, table_sizes, worker_memory, writing_bytes
from everstep.sizing.probe_readings import ProbeRun, ScriptReading
from everstep.sizing.throughput import ThroughputLaw
from everstep.units import human_bytes

NEAR: Final = 0.97
"""A smaller size counts as equally fast if it reaches this share of the best rate."""

PS_BUSY: Final = 0.7
"""A ps should not keep more than this share of a machine's cores busy."""

_HOUR_S: Final = 3600.0
_BUSY: Final = 0.85  # of all cores: then the cores bind
_WAITS: Final = 0.3  # of a step
_OTHERS: Final = 0.3  # cores of other processes that are worth a word


class Binding(StrEnum):
    """Names what keeps a job from being faster."""

    CORES = "cores"
    PS = "ps"
    DATA = "data"
    COMPUTE = "compute"
    BARRIER = "barrier"
    MEMORY = "memory"
    BUDGET = "budget"
    UNKNOWN = "unknown"


class Estimated(msgspec.Struct, frozen=True):
    """Is one number of an estimate with its error bar: ``low`` <= ``value`` <= ``high``, and why it is so."""

    value: float
    low: float
    high: float
    unit: str
    reason: str


class Wishes(msgspec.Struct, frozen=True):
    """Says within what a size is chosen. 0: no bound. ``workers``, ``ps``: exactly so many, -1: any number."""

    mode: str = "ps"
    workers: int = -1
    ps: int = -1
    max_workers: int = 0
    max_ps: int = 0
    machines: int = 1
    memory_bytes: float = 0.0  # of each machine, for this job
    price_usd_h: float = 0.0  # of each machine
    deadline_s: float = 0.0
    budget_usd: float = 0.0
    parity: ParityCode = OFF
    epochs: int = 0  # 0: as the script says

    @property
    def has_ps(self) -> bool:
        return self.ps > 0 or (self.mode == "ps" and self.ps < 0)


class Size(msgspec.Struct, frozen=True):
    """Is one size of a job and what it would do. ``memory_bytes``: of the fullest machine; ``misses``: wishes that it
    does not meet."""

    workers: int
    ps: int
    machines: int
    threads: int
    samples_per_s: float
    error: float
    busy: float
    measured: bool
    duration_s: float
    cost_usd: float
    memory_bytes: float
    misses: tuple[Binding, ...] = ()


class Sizing(msgspec.Struct, frozen=True):
    """Is an estimate: the size that was chosen, its figures by name, what binds, and the sizes beside it."""

    mode: str
    size: Size
    figures: dict[str, Estimated]
    binding: Binding
    why: str
    sizes: tuple[Size, ...]
    notes: tuple[str, ...] = ()


class Estimator:
    """Knows a script by its probes, and sizes it. Raises ValueError if the probes have measured nothing."""

    def __init__(self, probes: tuple[ProbeRun, ...], wishes: Wishes) -> None:
        self.probes, self.wishes = probes, wishes
        self.law = ThroughputLaw(probes)
        self.tables = table_sizes(probes[0])
        self.script: ScriptReading = probes[0].script
        self.epochs = wishes.epochs or self.script.epochs

    def __repr__(self) -> str:
        return f"<Estimator of {self.script.samples:,} samples x {self.epochs}, {len(self.tables)} tables>"

    def sizing(self) -> Sizing:
        """Return the estimate. Raises ConfigError where bounds exclude each other."""
        sizes = self._sizes()
        if not sizes:
            raise ConfigError(self._empty())
        size, why = self._choose(sizes)
        binding, words = self._binding(size, sizes)
        return Sizing(
            self.wishes.mode, size, self._figures(size, why), binding, words, tuple(sizes), tuple(self._notes(size))
        )

    # ------------------------------------------------------------ sizes

    def _sizes(self) -> list[Size]:
        wishes, cores = self.wishes, self.law.cores
        most = wishes.max_workers or max(1, cores * wishes.machines // self.probes[0].stages)
        workers = [wishes.workers] if wishes.workers >= 0 else list(range(1, most + 1))
        found = []
        for machines in range(1, wishes.machines + 1):
            for w in workers:
                if w < machines and wishes.ps != 0 and machines > 1:
                    continue
                found += [self.size(w, p, machines) for p in self._ps_counts(w, machines)]
        return [s for s in found if s.workers >= 1]

    def _ps_counts(self, workers: int, machines: int) -> list[int]:
        """Return the numbers of ps worth a look: those asked for, else from the fewest that carry the load."""
        wishes = self.wishes
        if not wishes.has_ps:
            return [0]
        if wishes.ps > 0:
            return [wishes.ps]
        top = wishes.max_ps or max(4, machines, wishes.parity.width)
        if top < wishes.parity.width:
            return []
        return list(range(max(1, wishes.parity.width), top + 1))

    def size(self, workers: int, ps: int, machines: int) -> Size:
        """Return what a job of this size would do."""
        wishes, law = self.wishes, self.law
        rate = law.rate(workers, ps, machines)
        startup_s = self.probes[0].start_s
        duration_s = startup_s + self.script.samples * self.epochs / rate.samples_per_s
        cost = wishes.price_usd_h * machines * duration_s / _HOUR_S
        memory = self._memory(workers, ps, machines)
        per_machine = -(-workers // machines) * self.probes[0].stages
        misses = []
        if wishes.memory_bytes and memory > wishes.memory_bytes:
            misses.append(Binding.MEMORY)
        if wishes.budget_usd and cost > wishes.budget_usd:
            misses.append(Binding.BUDGET)
        if ps and rate.samples_per_s * self._ps_cpu_s(ps) / ps > PS_BUSY * law.cores:
            misses.append(Binding.PS)
        return Size(
            workers,
            ps,
            machines,
            max(1, law.cores // max(1, per_machine)),
            rate.samples_per_s,
            rate.error,
            rate.busy,
            rate.measured,
            duration_s,
            cost,
            memory,
            tuple(misses),
        )

    def _ps_cpu_s(self, ps: int) -> float:
        return self.law.cpu_s(ps) - self.probes[-1].worker_cpu_s

    def _memory(self, workers: int, ps: int, machines: int) -> float:
        """Return the bytes that the job needs on its fullest machine: the one with the master."""
        worker = worker_memory(self.probes, workers, self.wishes.mode).high * -(-workers // machines)
        server = ps_memory(self.probes, ps, self.wishes.parity).high * -(-ps // machines) if ps else 0.0
        return worker + server + self.probes[0].master_peak_bytes

    def _empty(self) -> str:
        wishes = self.wishes
        if wishes.max_ps and wishes.max_ps < wishes.parity.width:
            return f"--max-ps {wishes.max_ps}: parity {wishes.parity} needs at least {wishes.parity.width} ps"
        return f"--max-workers {wishes.max_workers}: no size is left; allow more, or name no bound"

    # ------------------------------------------------------------ the choice

    def _choose(self, sizes: list[Size]) -> tuple[Size, str]:
        """Return the size and the reason in words."""
        wishes = self.wishes
        fit = [s for s in sizes if Binding.MEMORY not in s.misses and Binding.BUDGET not in s.misses]
        if not fit:
            least = min(sizes, key=lambda s: (len(s.misses), s.memory_bytes, s.cost_usd))
            return least, f"no size meets all bounds ({', '.join(sorted({m for s in sizes for m in s.misses}))})"
        if wishes.deadline_s:
            timely = [s for s in fit if s.duration_s * (1 + s.error) <= wishes.deadline_s]
            if timely:
                return min(timely, key=_cheapness), "the smallest that meets the deadline at the end of its error bar"
            return max(fit, key=lambda s: s.samples_per_s), "no size meets the deadline; this is the fastest"
        best = max(s.samples_per_s for s in fit)
        near = [s for s in fit if s.samples_per_s >= NEAR * best]
        return min(near, key=_cheapness), f"the smallest within {100 * (1 - NEAR):.0f} % of the fastest"

    def _binding(self, size: Size, sizes: list[Size]) -> tuple[Binding, str]:
        for kind in (Binding.MEMORY, Binding.BUDGET):
            if kind in size.misses:
                return kind, self._missing(kind, size)
        cpu_s, ps_s = self.law.cpu_s(size.ps), self._ps_cpu_s(size.ps) if size.ps else 0.0
        cores = self.law.cores * size.machines
        if size.busy >= _BUSY:
            share = f"of a sample's processor time workers take {100 * (1 - ps_s / cpu_s):.0f} %"
            words = f"{cores} cores are busy to {100 * size.busy:.0f} %; {share}, ps {100 * ps_s / cpu_s:.0f} %"
            return Binding.CORES, words
        if Binding.PS in size.misses:
            return Binding.PS, f"{size.ps} ps would be busy to more than {100 * PS_BUSY:.0f} % of a machine's cores"
        phases = self.script.phases
        if not phases:
            return Binding.UNKNOWN, "records of earlier jobs do not say; a probe does (without --no-run)"
        whole = sum(phases.values()) or 1.0
        waits = {
            Binding.DATA: phases.get("data", 0.0),
            Binding.PS: phases.get("pull", 0.0) + phases.get("push", 0.0),
            Binding.BARRIER: phases.get("barrier", 0.0),
        }
        kind = max(waits, key=lambda k: waits[k])
        waiting = waits[kind] / whole
        if waiting >= _WAITS:
            return kind, f"a worker waits {100 * waiting:.0f} % of its step for {_WORDS[kind]}"
        return Binding.COMPUTE, f"a worker computes {100 * (1 - sum(waits.values()) / whole):.0f} % of its step"

    def _missing(self, kind: Binding, size: Size) -> str:
        if kind is Binding.MEMORY:
            need, have = human_bytes(size.memory_bytes), human_bytes(self.wishes.memory_bytes)
            return f"it needs {need} on a machine that has {have}: more machines (--machines), or smaller tables"
        return f"it costs {size.cost_usd:.2f} USD, and the budget is {self.wishes.budget_usd:.2f} USD"

    # ------------------------------------------------------------ figures

    def _figures(self, size: Size, why: str) -> dict[str, Estimated]:
        found = {
            "workers": _exact(size.workers, "processes", "as asked" if self.wishes.workers >= 0 else why),
            "ps": _exact(size.ps, "processes", self._why_ps(size)),
            "machines": _exact(size.machines, "machines", f"{self.law.cores} cores each"),
            "threads": _exact(size.threads, "threads a worker", "cores of a machine over its workers, at least 1"),
        }
        worker = worker_memory(self.probes, size.workers, self.wishes.mode)
        found["worker_memory"] = Estimated(worker.likely, worker.low, worker.high, "bytes", self._why_worker())
        if size.ps:
            server = ps_memory(self.probes, size.ps, self.wishes.parity)
            rows = sum(t.bytes for t in self.tables)
            reason = f"{human_bytes(rows)} of rows over {size.ps} ps, parity {self.wishes.parity}, beside the process"
            if self.probes[0].recorded:
                reason = f"peak of an earlier job with {self.probes[0].ps} ps, rows included"
            found["ps_memory"] = Estimated(server.likely, server.low, server.high, "bytes", reason)
        master = float(self.probes[0].master_peak_bytes)
        if master:
            found["master_memory"] = Estimated(master, 0.9 * master, 1.2 * master, "bytes", "measured in the probe")
        rate, error = size.samples_per_s, size.error
        source = "earlier job" if self.probes[0].recorded else "probe"
        how = f"measured in one {source} of this size" if size.measured else f"by the law of throughput from {source}s"
        found["samples_per_s"] = Estimated(rate, rate * (1 - error), rate * (1 + error), "samples/s", how)
        total = self.script.samples * self.epochs
        low, high = size.duration_s / (1 + error), size.duration_s / max(0.05, 1 - error)
        reason = (
            f"{total:,} samples ({self.script.samples:,} x {self.epochs} epochs) and {self.probes[0].start_s:.0f} s"
        )
        found["duration"] = Estimated(
            size.duration_s, low, high, "s", f"{reason} of start; without what follows the loop"
        )
        if self.wishes.price_usd_h:
            factor = size.cost_usd / size.duration_s
            reason = f"{size.machines} machines at {self.wishes.price_usd_h:g} USD/h"
            found["cost"] = Estimated(size.cost_usd, low * factor, high * factor, "USD", reason)
        return found

    def _why_ps(self, size: Size) -> str:
        if not size.ps:
            return f"mode {self.wishes.mode} without tables on ps"
        if self.wishes.ps >= 0:
            return "as asked"
        if self.wishes.parity.m and size.ps == self.wishes.parity.width:
            return f"parity {self.wishes.parity} needs so many"
        return "the fewest that carry rows and requests"

    def _why_worker(self) -> str:
        script = self.script
        if self.probes[0].recorded:
            return "peak of an earlier job"
        parts = [f"{human_bytes(script.parameter_bytes)} of parameters"]
        if script.optimizer_bytes:
            parts.append(f"{human_bytes(script.optimizer_bytes)} of optimizer state")
        parts.append(f"{human_bytes(script.activation_bytes)} kept for backward by a batch of {script.batch}")
        if writing := writing_bytes(self.probes[0], self.wishes.mode):
            parts.append(f"and {human_bytes(writing)} more while it writes the model")
        return "peak of the probe, while it trains: " + ", ".join(parts)

    def _notes(self, size: Size) -> list[str]:
        notes = []
        if self.wishes.has_ps and self.script.tables and all(t.dense for t in self.script.tables):
            notes.append("the script has no tables: its dense part alone is on the ps; see --mode allreduce")
        if (others := max(p.others_cores for p in self.probes)) >= _OTHERS:
            notes.append(
                f"other processes kept {others:.1f} of {self.law.cores} cores busy: on a quiet machine it is faster"
            )
        if (probe := self.probes[-1]).growing_samples_per_s:
            notes.append(
                f"tables grow at first: {probe.growing_samples_per_s:,.0f} samples/s with {probe.workers} workers and "
                f"{probe.ps} ps then, and {probe.samples_per_s:,.0f} over the whole job, which makes "
                f"{probe.rows_per_sample:.2g} rows for a sample"
            )
        if size.machines > 1:
            notes.append("the network between machines is not counted")
        if any(t.admit_after or t.expires for t in self.script.tables):
            notes.append("tables with admission or expiry may have fewer rows than keys")
        return notes


_WORDS: Final = {
    Binding.DATA: "the next batch of data",
    Binding.PS: "the ps",
    Binding.BARRIER: "the other workers",
}


def _cheapness(size: Size) -> tuple[float, ...]:
    return size.machines, size.workers + size.ps, size.ps, -size.samples_per_s


def _exact(value: int, unit: str, reason: str) -> Estimated:
    return Estimated(value, value, value, unit, reason)


def check_wishes(wishes: Wishes) -> None:
    """Raises ConfigError for bounds that exclude each other, or that no size can meet."""
    for name, asked, most in (
        ("workers", wishes.workers, wishes.max_workers),
        ("ps", wishes.ps, wishes.max_ps),
    ):
        if most and asked > most:
            raise ConfigError(f"--{name} {asked} and --max-{name} {most}: exclude each other; leave one out")
    if wishes.workers == 0:
        raise ConfigError("--workers 0: a job has at least one worker")
    if wishes.mode == "ps" and wishes.ps == 0:
        raise ConfigError("--ps 0 in mode ps: the parameters need at least one; or --mode allreduce")
    if wishes.mode == "pipeline" and wishes.ps > 0:
        raise ConfigError(f"--ps {wishes.ps} in mode pipeline: a model in stages has no ps; leave it out")
    if wishes.budget_usd and not wishes.price_usd_h:
        raise ConfigError(f"--budget {wishes.budget_usd:g}: needs --price, the USD that a machine costs an hour")
    if wishes.has_ps and 0 < wishes.ps < wishes.parity.width:
        raise ConfigError(f"--ps {wishes.ps}: parity {wishes.parity} needs at least {wishes.parity.width} ps")
    if math.isnan(wishes.deadline_s):
        raise ConfigError("--deadline: not a number")
