"""What the full form of the benchmark of reclaims plays, and how it sums it up."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_each_recording_is_played_in_each_mode_and_each_mode_with_each_notice() -> None:
    from benchmarks.reclaim import NOTICES_S, PLANS, RECORDINGS

    modes = ("ps", "allreduce", "hybrid")
    assert {(plan.recording, plan.mode) for plan in PLANS} == set(product(RECORDINGS, modes))
    assert {(plan.mode, plan.lead_s) for plan in PLANS} == set(product(modes, NOTICES_S))
    assert len({plan.name for plan in PLANS}) == len(PLANS)
    assert sorted(RECORDINGS.values()) == [4, 4, 16, 16]


def test_a_machine_outlives_its_notice_and_parity_is_as_wide_as_the_machines_allow() -> None:
    from benchmarks.reclaim import PLANS

    for plan in PLANS:
        assert plan.quiet_s > plan.lead_s
        flags = plan.flags(1.0)
        if plan.mode != "allreduce":
            parity, ps = flags[flags.index("--parity") + 1], int(flags[flags.index("--ps") + 1])
            assert ps == sum(map(int, parity.split("+"))) <= plan.nodes + 1  # a unit of a stripe on each machine


def test_one_job_that_is_not_exact_or_whose_node_was_not_empty_in_time_is_seen() -> None:
    from benchmarks.reclaim import Reclaimed, _summed

    good = Reclaimed("", 50, 30.0, 0.9, [1.0, 2.0], 1)
    late = Reclaimed("a sample was applied more than once", 51, 30.0, 0.8, [31.0], 0)
    assert all(_summed([good])["holds"].values())
    found = _summed([good, late])
    assert found["holds"] == {"exact": False, "empty_of_notice": False}
    assert found["figures"]["reclaims"] == 101.0 and found["figures"]["reclaims_least"] == 50.0
