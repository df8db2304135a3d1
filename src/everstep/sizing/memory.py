"""Computes the memory of each role: what the probe's process had, and what more rows will add."""

from __future__ import annotations

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


def ps_memory(probe: ProbeRun, ps: int, parity: ParityCode) -> RoleMemory:
    """Return the peak of each of ``ps`` ps. Partitions are spread evenly. With parity K+M each partition has M / K as
    many bytes elsewhere."""
    script = probe.script
    had = [float(t.fixed or t.probed) for t in script.tables]
    own = max(0.0, probe.ps_peak_bytes - ps_rows_bytes(script.tables, had, script.partitions) / max(1, probe.ps))
    factor = 1.0 + parity.m / parity.k
    largest = -(-script.partitions // ps) / script.partitions  # the share of the ps with most partitions
    found = []
    for pick in ("low", "likely", "high"):
        rows = [max(float(t.probed), getattr(rows_of(t), pick)) for t in script.tables]
        found.append(factor * largest * ps_rows_bytes(script.tables, rows, script.partitions))
    return RoleMemory(own * (1 - _PROCESS) + found[0], own + found[1], own * (1 + _PROCESS) + found[2])


def worker_memory(probes: tuple[ProbeRun, ...], workers: int) -> RoleMemory:
    """Return the peak of each worker while it trains. The probe counts that had as many threads."""
    probe = probes[-1] if workers >= probes[-1].workers else probes[0]
    peak = probe.worker_peak_bytes
    return RoleMemory(peak * (1 - _PROCESS), peak, peak * (1 + _PROCESS))
