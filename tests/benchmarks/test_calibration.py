"""How a real run is compared with its forecast."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.brain.events import CapacityChanged, Event
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_a_run_counts_until_its_last_reclaim_that_is_asked_for() -> None:
    from benchmarks.reclaim import until_reclaim

    steps = [CapacityStep.GRANTED, CapacityStep.TAKEN_BACK, CapacityStep.WARNED, CapacityStep.TAKEN_BACK]
    events = [Event(float(n), CapacityChanged(NodeId(f"n{n}"), step)) for n, step in enumerate(steps)]
    assert until_reclaim(events, 1) == events[:2]
    assert until_reclaim(events, 2) == events
    assert until_reclaim(events, 9) == events
