"""Computes the memory of each role: what the probe's process had, and what more rows will add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from everstep.config.parity import ParityCode
from everstep.sizing.probe_readings import DistinctKeys, ProbeRun, TableReading
from everstep.sizing.store_memory import ps_rows_bytes

_PROCESS: Final = 0.05  # relative error of a process's own memory, from run to run


class RoleMemory(NamedTuple):
    """Says the peak of one process of a role, in bytes: ``low`` <= ``likely`` <= ``high``."""

    low: float
    likely: float
    high: float


class TableSize(NamedTuple):
    """Says how many rows a table gets, and what they take at all ps together, mirrors not counted."""

    name: str
    rows: DistinctKeys
    bytes: float


def rows_of(table: TableReading) -> DistinctKeys:
    """Return how many rows a table gets. Keys that are admitted late or expire make fewer rows than keys: only the
    upper bound counts them all."""
    if table.fixed:
        return DistinctKeys(table.fixed, table.fixed, table.fixed, whole=True)
    keys = table.keys
    if table.admit_after or table.expires:
        return DistinctKeys(0.0, keys.likely, keys.high, keys.seen, keys.total, False, keys.sketched)
    return keys


def table_sizes(probe: ProbeRun) -> list[TableSize]:
    """Return the tables of a script, with their rows."""
    script = probe.script
    found = []
    for table in script.tables:
        rows = rows_of(table)
        found.append(TableSize(table.name, rows, ps_rows_bytes((table,), [rows.likely], script.partitions)))
    return found


def rows_had(tables: tuple[TableReading, ...], probe: ProbeRun) -> list[float]:
    """Return how many rows of each of ``tables`` a probe had at its end. One that did not count them by table knows
    their sum; it has made as much of each as the probe that did."""
    counted, fixed = sum(t.probed for t in tables if not t.fixed), sum(t.fixed for t in tables)
    scale = max(0.0, probe.rows - fixed) / counted if not probe.script.tables and probe.rows and counted else 1.0
    return [float(t.fixed) or t.probed * scale for t in tables]


def ps_memory(probes: Sequence[ProbeRun], ps: int, parity: ParityCode) -> RoleMemory:
    """Return the peak of each of ``ps`` ps, from the last probe with as many, else from the first one. Partitions are
    spread evenly. With parity K+M each partition has M / K as many bytes elsewhere."""
    script = probes[0].script
    probe = next((p for p in reversed(probes) if p.ps == ps and p.rows), probes[0])
    had = rows_had(script.tables, probe)
    own = max(0.0, probe.ps_peak_bytes - ps_rows_bytes(script.tables, had, script.partitions) / max(1, probe.ps))
    factor = 1.0 + parity.m / parity.k
    largest = -(-script.partitions // ps) / script.partitions  # the share of the ps with most partitions
    found = []
    for pick in ("low", "likely", "high"):
        rows = [max(n, getattr(rows_of(t), pick)) for t, n in zip(script.tables, had, strict=True)]
        found.append(factor * largest * ps_rows_bytes(script.tables, rows, script.partitions))
    return RoleMemory(own * (1 - _PROCESS) + found[0], own + found[1], own * (1 + _PROCESS) + found[2])


def worker_memory(probes: tuple[ProbeRun, ...], workers: int, mode: str) -> RoleMemory:
    """Return the peak of each worker from its first batch to its last, and of the one that writes the model. The probe
    counts that had as many threads."""
    probe = probes[-1] if workers >= probes[-1].workers else probes[0]
    peak = probe.worker_peak_bytes + writing_bytes(probe, mode)
    return RoleMemory(peak * (1 - _PROCESS), peak, peak * (1 + _PROCESS))


def writing_bytes(probe: ProbeRun, mode: str) -> int:
    """Return what a worker needs beside its own state while it writes that of the job, as every job does at its end: a
    copy of all of it, and one of the file that it writes, the model's or the optimizers'. A probe does not come so far,
    and an earlier job's peak holds it. 0: the ps write theirs, or each stage its part."""
    if mode != "allreduce" or probe.recorded:
        return 0
    model, optimizers = probe.script.parameter_bytes, probe.script.optimizer_bytes
    return model + optimizers + max(model, optimizers)
