"""A real master with many members, which a few processes play over real connections."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def _members_join_train_and_leave(nodes: int, processes: int, seconds: float, noticed: int, vanished: int) -> None:
    from benchmarks._real_master import measure

    seen = measure(nodes, 2, processes, seconds, noticed, vanished)
    assert seen.members == 2 * nodes + 1
    assert seen.agents == nodes + 2
    assert seen.beats > 0
    assert seen.unexpected == 0
    assert 0 < seen.notice_ordered_s <= seen.notice_empty_s
    assert seen.notice_answered_s > 0


def test_sixty_members_join_train_and_are_emptied_on_a_notice() -> None:
    _members_join_train_and_leave(nodes=30, processes=2, seconds=1.0, noticed=10, vanished=0)


@pytest.mark.slow
def test_five_hundred_members_join_train_and_are_emptied_on_a_notice() -> None:
    _members_join_train_and_leave(nodes=250, processes=4, seconds=5.0, noticed=125, vanished=25)
