"""A size is chosen by memory, deadline and budget, and says why."""

from __future__ import annotations

import pytest
from sizes import probe, table

from everstep.config.parity import ParityCode
from everstep.errors import ConfigError
from everstep.sizing.probe_readings import TableReading
from everstep.sizing.size_choice import Binding, Estimator, Wishes, check_wishes

TWO = (probe(tables=(table(),)), probe(2, 2, rate=20_000.0, tables=(table(),)))


def test_without_wishes_the_smallest_of_the_fastest() -> None:
    sizing = Estimator(TWO, Wishes(memory_bytes=16e9)).sizing()
    assert (sizing.size.workers, sizing.size.ps) == (4, 1)
    assert sizing.binding is Binding.CORES and "4 cores are busy" in sizing.why
    rate, duration = sizing.figures["samples_per_s"], sizing.figures["duration"]
    assert rate.low < rate.value < rate.high
    assert duration.value == pytest.approx(5.0 + 2e7 / rate.value)
    assert "cost" not in sizing.figures


def test_a_deadline_takes_no_more_than_it_needs() -> None:
    sizing = Estimator(TWO, Wishes(memory_bytes=16e9, deadline_s=2 * 3600.0)).sizing()
    assert sizing.size.workers == 1
    assert "meets the deadline" in sizing.figures["workers"].reason
    late = Estimator(TWO, Wishes(memory_bytes=16e9, deadline_s=60.0)).sizing()
    assert "no size meets the deadline" in late.figures["workers"].reason


def test_machines_are_taken_for_a_deadline_and_paid() -> None:
    wishes = Wishes(memory_bytes=16e9, machines=4, price_usd_h=3.6, deadline_s=400.0)
    sizing = Estimator(TWO, wishes).sizing()
    assert sizing.size.machines > 1
    assert sizing.figures["cost"].value == pytest.approx(sizing.size.machines * sizing.size.duration_s / 1000)
    assert "the network between machines is not counted" in sizing.notes


def test_memory_that_is_not_there_binds() -> None:
    big = (probe(tables=(table(1e9),)),)
    sizing = Estimator(big, Wishes(memory_bytes=16e9)).sizing()
    assert sizing.binding is Binding.MEMORY
    assert "more machines" in sizing.why


def test_a_budget_that_is_too_small_binds() -> None:
    sizing = Estimator(TWO, Wishes(memory_bytes=16e9, price_usd_h=10.0, budget_usd=0.01)).sizing()
    assert sizing.binding is Binding.BUDGET


def test_parity_adds_mirrors_and_ps() -> None:
    plain = Estimator(TWO, Wishes(memory_bytes=16e9, ps=3)).sizing()
    safe = Estimator(TWO, Wishes(memory_bytes=16e9, ps=3, parity=ParityCode(2, 1))).sizing()
    own = TWO[0].ps_peak_bytes
    rows = plain.figures["ps_memory"].value - own
    assert safe.figures["ps_memory"].value - own == pytest.approx(1.5 * rows)
    chosen = Estimator(TWO, Wishes(memory_bytes=16e9, parity=ParityCode(2, 1))).sizing()
    assert chosen.size.ps == 3 and "parity 2+1 needs so many" in chosen.figures["ps"].reason


def test_what_a_worker_waits_for_binds() -> None:
    waits = probe(cores=64, phases={"data": 2.0, "forward": 1.0})
    sizing = Estimator((waits,), Wishes(memory_bytes=16e9, workers=1)).sizing()
    assert sizing.binding is Binding.DATA and "67 %" in sizing.why


def test_a_script_without_tables_is_told() -> None:
    dense = TableReading("dense", 64, 64, dense=True, fixed=100)
    sizing = Estimator((probe(tables=(dense,)),), Wishes(memory_bytes=16e9)).sizing()
    assert any("no tables" in note for note in sizing.notes)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(workers=8, max_workers=4), "--workers 8 and --max-workers 4: exclude each other"),
        (Wishes(ps=8, max_ps=4), "--ps 8 and --max-ps 4: exclude each other"),
        (Wishes(workers=0), "--workers 0: a job has at least one"),
        (Wishes(ps=0), "--ps 0 in mode ps"),
        (Wishes(mode="pipeline", ps=2), "--ps 2 in mode pipeline"),
        (Wishes(budget_usd=5.0), "--budget 5: needs --price"),
        (Wishes(ps=2, parity=ParityCode(2, 1)), "--ps 2: parity 2\\+1 needs at least 3"),
    ],
)
def test_bounds_that_exclude_each_other(wishes: Wishes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_wishes(wishes)


def test_fewer_ps_than_parity_needs() -> None:
    with pytest.raises(ConfigError, match="--max-ps 2: parity 2\\+1 needs at least 3 ps"):
        Estimator(TWO, Wishes(max_ps=2, parity=ParityCode(2, 1))).sizing()
