"""The simulated half of ``bubble_goodput``: what must hold whatever real jobs showed."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_goodput_grows_with_the_time_between_losses_on_both_sides() -> None:
    from benchmarks.bubble_goodput import BETWEEN, Side, best_restart, with_copies

    side = Side(0.03, 0.0003, [0.6, 0.9], [1, 2])
    ours = [with_copies(side, between_s, 0) for between_s in BETWEEN.values()]
    theirs = [best_restart(side, between_s) for between_s in BETWEEN.values()]
    for found in (ours, theirs):
        assert found == sorted(found) and 0.0 < found[0] < found[-1] < 1.0
    assert ours[-1] > 0.98


def test_with_the_same_costs_a_copy_per_step_loses_less_than_the_best_checkpoints() -> None:
    """Where losses are frequent; where they are rare, copies cost up to their bound of 1 %, and checkpoints less."""
    from benchmarks.bubble_goodput import Side, best_restart, with_copies

    copies, checkpoints = Side(0.03, 0.0001, [1.0]), Side(0.03, 0.02, [1.0])
    assert with_copies(copies, 5.0, 1) > best_restart(checkpoints, 5.0)


def test_the_restart_has_the_best_of_all_intervals() -> None:
    from benchmarks.bubble_goodput import SWEEP, Side, best_restart, with_restarts

    side = Side(0.1, 0.5, [20.0])
    best = best_restart(side, 600.0)
    assert best >= max(with_restarts(side, 600.0, interval_s, 2) for interval_s in SWEEP) * 0.97


def test_the_picture_is_svg_with_all_curves() -> None:
    from benchmarks.bubble_goodput import picture

    curves = {"real everstep": {5.0: 0.5}, "simulated everstep": {5.0: 0.5, 60.0: 0.9}, "simulated restart": {5.0: 0.1}}
    root = ET.fromstring(picture(curves))
    words = {element.text for element in root.iter() if element.text}
    assert set(curves) <= words and {"5s", "10d"} <= words
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 1
