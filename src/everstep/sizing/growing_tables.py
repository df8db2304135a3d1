"""Computes what a sample of a whole job takes whose tables still grow in a probe.

A probe of some seconds sees the begin of a job. Nearly each key of a large table makes a row there: memory is mapped,
indexes are doubled. Later, keys come again. So such a script is probed twice at one size: while rows are made, and over
rows that are there. Seconds and processor seconds of a sample are taken as linear in the rows that it makes; the whole
job makes its rows once.
"""

from __future__ import annotations

from typing import Final

import msgspec

from everstep.sizing.memory import rows_had, rows_of
from everstep.sizing.probe_readings import ProbeRun, ScriptReading, TableReading

FILLED_S: Final = 4.0
"""For so many seconds of the first probe's rate a probe over known rows makes them: the time that it warms up and
measures."""

_ROW_S: Final = 1e-6  # that a new row takes at most, as far as the question goes whether it matters
_MATTERS: Final = 0.03  # of a sample's time: a probe's own noise


def rows_per_sample(tables: tuple[TableReading, ...], samples: int) -> float:
    """Return how many rows a job of so many samples, over all epochs, makes for one of them."""
    return sum(rows_of(table).likely for table in tables if not table.fixed) / max(1, samples)


def rows_matter(fresh: ProbeRun, job_rows: float) -> bool:
    """Return whether a probe made so many more rows for a sample than the whole job (``job_rows``) that it is worth a
    probe over rows that are there."""
    return (fresh.rows_per_sample - job_rows) * _ROW_S * fresh.samples_per_s > _MATTERS


def filled_samples(fresh: ProbeRun) -> int:
    """Return how many samples make the rows of a probe over known rows."""
    return max(16 * fresh.script.batch, int(FILLED_S * fresh.samples_per_s))


def of_whole_job(fresh: ProbeRun, known: ProbeRun, job_rows: float) -> ProbeRun:
    """Return the probe of a job that makes ``job_rows`` rows for a sample. ``fresh``, ``known``: probes of one size,
    while rows were made and over known ones. A worker's memory, tables and the time of the start are those of
    ``fresh``; the peak of a ps is that of ``known``, whose rows were counted while they did not grow."""
    span = fresh.rows_per_sample - known.rows_per_sample
    if span <= 0 or known.samples_per_s <= 0 or fresh.samples_per_s <= 0:
        return fresh
    share = min(1.0, max(0.0, (job_rows - known.rows_per_sample) / span))

    had = rows_had(fresh.script.tables, known)
    tables = tuple(msgspec.structs.replace(t, probed=round(n)) for t, n in zip(fresh.script.tables, had, strict=True))

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    return msgspec.structs.replace(
        fresh,
        samples_per_s=1 / between(1 / known.samples_per_s, 1 / fresh.samples_per_s),
        spread=between(known.spread, fresh.spread),
        worker_cpu_s=between(known.worker_cpu_s, fresh.worker_cpu_s),
        ps_cpu_s=between(known.ps_cpu_s, fresh.ps_cpu_s),
        others_cores=max(known.others_cores, fresh.others_cores),
        ps_peak_bytes=known.ps_peak_bytes,
        rows=known.rows,
        rows_per_sample=job_rows,
        growing_samples_per_s=fresh.samples_per_s,
        script=_of_window(fresh.script, fresh.script if share > 0.5 else known.script, tables),
    )


def _of_window(script: ScriptReading, of: ScriptReading, tables: tuple[TableReading, ...]) -> ScriptReading:
    """Return ``of``, whose window counts more, with what only the probe knows that had all of the data and counted its
    keys (``script``)."""
    return msgspec.structs.replace(
        of, samples=script.samples, tables=tables, read_samples_per_s=script.read_samples_per_s, scan_s=script.scan_s
    )
