"""How long a job waits, and when capacity is back: policies/waits.py."""

from __future__ import annotations

from everstep.config.spec import JobSpec
from everstep.policies.waits import Steadiness, lack_words, machines_needed, max_wait_s, refuse_count


def test_capacity_has_to_stay() -> None:
    back = Steadiness(need=2, stable_s=10.0)
    assert not back.offered(0.0, 2)
    assert not back.offered(9.0, 3)
    assert not back.offered(9.5, 1)  # it was gone for a moment
    assert not back.offered(10.0, 2)
    assert not back.offered(19.0, 2)
    assert back.offered(20.0, 2)


def test_nothing_is_needed_for_long() -> None:
    assert Steadiness(need=0, stable_s=0.0).offered(0.0, 0)


def test_words() -> None:
    assert lack_words(2, 2, 1, 1) == ""
    assert lack_words(1, 4, 0, 2) == "1 of at least 4 workers are there and 0 of at least 2 ps are there"
    assert max_wait_s(JobSpec()) == 0.0
    assert max_wait_s(JobSpec(max_wait="10m")) == 600.0
    assert refuse_count(JobSpec(), "workers", 10_000) == ""


def test_how_many_machines_a_suspended_job_needs() -> None:
    assert machines_needed(JobSpec(workers=4)) == 1
    assert machines_needed(JobSpec(workers=1, min_workers=6, capacity_workers=2)) == 3
    assert machines_needed(JobSpec(workers=4, recovery="wait_for_all")) == 1
