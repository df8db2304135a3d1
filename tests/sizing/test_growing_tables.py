"""A sample of a whole job takes what two probes say, one that makes rows and one that finds them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sizes import keys, probe, table

from everstep.config.parity import OFF
from everstep.sizing.growing_tables import filled_samples, of_whole_job, rows_matter, rows_per_sample
from everstep.sizing.memory import ps_memory, rows_had
from everstep.sizing.probe_readings import ProbeRun, TableReading
from everstep.sizing.size_choice import Estimator, Wishes
from everstep.sizing.store_memory import ps_rows_bytes


def made(run: ProbeRun, rows: float) -> ProbeRun:
    return msgspec.structs.replace(run, rows_per_sample=rows)


def test_only_rows_that_come_with_their_keys_are_made() -> None:
    uploaded = TableReading("items", 16, 16, fixed=7_000_000, keys=keys(10.0))
    assert rows_per_sample((table(3e6), table(1e6), uploaded), 2_000_000) == 2.0
    assert rows_per_sample((), 0) == 0.0


@pytest.mark.parametrize(
    ("rate", "rows", "job_rows", "matter"),
    [
        (100_000.0, 8.0, 1.0, True),
        (100_000.0, 8.0, 7.9, False),
        (100_000.0, 0.1, 0.05, False),
        (1_000.0, 8.0, 1.0, False),  # (a millisecond for a sample: rows are nothing beside it)
        (100_000.0, 0.5, 3.0, False),  # (no job makes more rows than its begin)
    ],
)
def test_another_probe_only_where_rows_are_a_large_share(
    rate: float, rows: float, job_rows: float, matter: bool
) -> None:
    assert rows_matter(made(probe(rate=rate), rows), job_rows) is matter


def test_a_job_lies_between_its_probes_by_the_rows_that_it_makes() -> None:
    fresh = made(probe(rate=100_000.0, worker_cpu_s=1e-5, ps_cpu_s=9e-6, tables=(table(4e6, probed=10**6),)), 8.0)
    known = made(probe(rate=200_000.0, worker_cpu_s=8e-6, ps_cpu_s=3e-6), 0.0)
    found = of_whole_job(fresh, known, 2.0)
    assert 1 / found.samples_per_s == pytest.approx(5e-6 + 2 / 8 * 5e-6)
    assert found.worker_cpu_s == pytest.approx(8.5e-6) and found.ps_cpu_s == pytest.approx(4.5e-6)
    assert found.worker_peak_bytes == fresh.worker_peak_bytes
    sizing = Estimator((found,), Wishes(workers=1, ps=1)).sizing()
    assert any("tables grow at first: 100,000 samples/s" in note for note in sizing.notes)
    assert sizing.figures["samples_per_s"].value == pytest.approx(160_000.0)


@given(st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(1.0, 1e6), st.floats(1.0, 1e6))
def test_a_job_is_never_outside_of_its_probes(
    job_rows: float, fresh_rows: float, known_rows: float, fast: float, slow: float
) -> None:
    fresh, known = made(probe(rate=slow), fresh_rows), made(probe(rate=fast), known_rows)
    found = of_whole_job(fresh, known, job_rows)
    low, high = sorted((fast, slow))
    assert low * 0.999 <= found.samples_per_s <= high * 1.001
    if known_rows >= fresh_rows:
        assert found == fresh, "it says nothing"


def test_the_window_shown_is_that_of_the_probe_that_counts_more() -> None:
    fresh = made(probe(rate=100_000.0, phases={"pull": 3.0}), 8.0)
    known = made(probe(rate=200_000.0, phases={"forward": 3.0}), 0.0)
    assert of_whole_job(fresh, known, 1.0).script.phases == {"forward": 3.0}
    assert of_whole_job(fresh, known, 7.0).script.phases == {"pull": 3.0}


def ps_of(rows: float, ps: int, workers: int, *tables: TableReading, growing: bool = False) -> ProbeRun:
    """Return a probe whose ps take 60 MB and their rows."""
    made_rows = [t.fixed or rows / len([t for t in tables if not t.fixed]) for t in tables]
    peak = 60_000_000 + int(ps_rows_bytes(tables, made_rows, 64) / ps)
    run = probe(workers, ps, rate=100_000.0, tables=tables if (workers, ps) == (1, 1) and not growing else ())
    return msgspec.structs.replace(run, ps_peak_bytes=peak, rows=rows, rows_per_sample=0.0 if growing else 4.0)


def test_a_ps_is_that_of_a_probe_with_as_many_ps() -> None:
    tables = (table(4e6, probed=500_000), table(4e6, probed=500_000, dim=4), TableReading("d", 4, 4, fixed=1000))
    first = ps_of(1e6 + 1000, 1, 1, *tables)
    other = ps_of(2e6 + 1000, 3, 2, *tables)
    assert rows_had(tables, first) == [5e5, 5e5, 1000]
    assert rows_had(tables, other) == pytest.approx([1e6, 1e6, 1000])
    whole = 22 / 64 * ps_rows_bytes(tables, [4e6, 4e6, 1000.0], 64)
    assert ps_memory((first, other), 3, OFF).likely == pytest.approx(60e6 + whole, rel=0.01)
    assert ps_memory((first, other), 2, OFF) == ps_memory((first,), 2, OFF), "none had two"


def test_the_peak_over_known_rows_goes_with_their_count() -> None:
    tables = (table(4e6, probed=500_000), TableReading("d", 4, 4, fixed=1000))
    fresh, known = ps_of(5e5 + 1000, 1, 1, *tables), ps_of(1.5e6 + 1000, 1, 1, *tables, growing=True)
    found = of_whole_job(fresh, known, 1.0)
    assert [t.probed for t in found.script.tables if not t.fixed] == [1_500_000]
    assert ps_memory((found,), 1, OFF).likely == pytest.approx(60e6 + ps_rows_bytes(tables, [4e6, 1e3], 64), rel=0.01)


def test_a_probe_over_known_rows_makes_as_many_as_the_first_one_has_seen() -> None:
    assert filled_samples(probe(rate=100_000.0)) == 400_000
    assert filled_samples(probe(rate=10.0)) == 16 * 1024, "some batches, in any case"
