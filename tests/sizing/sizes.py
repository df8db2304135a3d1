"""Probes of made-up scripts, for tests of the arithmetic."""

from __future__ import annotations

from everstep.sizing.probe_readings import DistinctKeys, ProbeRun, ScriptReading, TableReading


def keys(n: float) -> DistinctKeys:
    return DistinctKeys(n, n, n, 1000, 1000, whole=True)


def table(rows: float = 1e6, probed: int = 0, dim: int = 16) -> TableReading:
    return TableReading("fields", dim, dim, keys=keys(rows), probed=probed)


def script(*tables: TableReading, samples: int = 10**7, epochs: int = 2, **more: object) -> ScriptReading:
    return ScriptReading(samples, epochs, 1024, 2, 0.0, 3.0, 30_000, 30, tables=tables, **more)  # type: ignore[arg-type]


def probe(
    workers: int = 1,
    ps: int = 1,
    rate: float = 10_000.0,
    worker_cpu_s: float = 1e-4,
    ps_cpu_s: float = 1e-5,
    cores: int = 4,
    tables: tuple[TableReading, ...] = (),
    **more: object,
) -> ProbeRun:
    return ProbeRun(
        workers,
        ps,
        cores,
        rate,
        0.01,
        worker_cpu_s,
        ps_cpu_s,
        400 << 20,
        60 << 20,
        50 << 20,
        5.0,
        script(*tables, **more),
    )
