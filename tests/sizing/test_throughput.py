"""The law of throughput goes through its probes, and bends where cores run out."""

from __future__ import annotations

import pytest
from sizes import probe

from everstep.sizing.throughput import ThroughputLaw


def test_what_was_probed_is_said_as_measured() -> None:
    law = ThroughputLaw([probe(), probe(2, 2, rate=19_000.0)])
    assert law.rate(1, 1)[0] == 10_000.0 and law.rate(1, 1).measured
    assert law.rate(2, 2)[0] == 19_000.0 and law.rate(2, 2).measured
    assert not law.rate(2, 1).measured
    assert law.rate(2, 1).error > law.rate(2, 2).error


def test_workers_add_up_until_the_cores_are_busy() -> None:
    law = ThroughputLaw([probe(cores=4), probe(2, 1, rate=20_000.0, cores=4)])
    assert law.rate(3, 1).samples_per_s == pytest.approx(30_000.0)
    most = 4 / (1e-4 + 1e-5)
    assert law.rate(4, 1).samples_per_s == pytest.approx(most)
    assert law.rate(16, 1).samples_per_s == pytest.approx(most)
    assert law.rate(16, 1).busy == pytest.approx(1.0)


def test_one_probe_alone_knows_the_cores() -> None:
    law = ThroughputLaw([probe(cores=2)])
    rates = [law.rate(w, 1).samples_per_s for w in (1, 2, 3, 8)]
    assert rates == sorted(rates) and rates[0] == 10_000.0
    assert rates[-1] <= 2 / (1e-4 + 1e-5)


def test_machines_multiply() -> None:
    law = ThroughputLaw([probe(), probe(2, 1, rate=19_000.0)])
    assert law.rate(8, 1, machines=4).samples_per_s == pytest.approx(4 * 19_000.0)
    assert law.rate(8, 1, machines=4).error > law.rate(2, 2).error


def test_further_ps_cost_what_the_second_probe_saw() -> None:
    """Worker and ps are slower by the same in the second probe: nothing is left for the second ps' requests."""
    alike = ThroughputLaw([probe(), probe(2, 2, rate=19_000.0, worker_cpu_s=1.2e-4, ps_cpu_s=1.2e-5)])
    assert alike.ps_growth == 0.0
    grown = ThroughputLaw([probe(), probe(2, 2, rate=19_000.0, worker_cpu_s=1e-4, ps_cpu_s=1.4e-5)])
    assert grown.ps_growth == pytest.approx(0.4)
    assert grown.rate(2, 3).samples_per_s < 19_000.0 < grown.rate(2, 1).samples_per_s


def test_nothing_was_measured() -> None:
    with pytest.raises(ValueError, match="no probe"):
        ThroughputLaw([])
    with pytest.raises(ValueError, match="no probe"):
        ThroughputLaw([probe(rate=0.0)])


def test_a_worker_that_waited_busily_alone_says_nothing_of_further_ps() -> None:
    """The threads of one worker that has all cores wait busily: with fewer threads a sample takes less."""
    law = ThroughputLaw([probe(), probe(2, 2, rate=19_000.0, worker_cpu_s=4e-5, ps_cpu_s=8e-6)])
    assert law.ps_growth == 0.0
    assert law.rate(2, 3).samples_per_s == law.rate(2, 2).samples_per_s
