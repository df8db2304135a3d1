"""A node that was emptied for a notice, and is still there: it joins again, unless its job is over."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from everstep.agent.agent import Agent
from everstep.cli import join
from everstep.model.notice import Notice


class Source:
    """A source that says the same thing for so many looks, and then that nothing is open."""

    name, every_s = "a cloud", 0.01

    def __init__(self, notice: Notice, looks: float) -> None:
        self.notice, self.left = notice, looks

    def look(self) -> tuple[Notice, ...]:
        self.left -= 1
        return (self.notice,) if self.left >= 0 else ()


def emptied(notice: Notice, looks: float) -> Agent:
    source = Source(notice, looks)
    of = SimpleNamespace(emptied_for=notice, node="b", notices=SimpleNamespace(sources=(source,)))
    return cast(Agent, of)


STAYS_S = 0.4
EVER_S = 1e6


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_LOOK_S", 0.01)


@pytest.mark.parametrize("ahead_s", [-300.0, 0.2, None])
def test_a_node_that_lives_on_behind_its_time_stays(ahead_s: float | None) -> None:
    """The notice is never taken back; its time passes, and nothing happens."""
    at = None if ahead_s is None else time.time() + ahead_s
    assert join._stays(emptied(Notice("a cloud", "k", "it goes", at), 1e9), lambda: True, STAYS_S)


def test_a_notice_that_is_taken_back_is_not_waited_out() -> None:
    assert join._stays(emptied(Notice("a cloud", "k", "it goes", time.time() + 1e5), 3), lambda: True, EVER_S)


def test_a_job_that_is_over_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_ASK_S", 0.02)
    assert not join._stays(emptied(Notice("a cloud", "k", "it goes", time.time() + 1e5), 1e9), lambda: False, EVER_S)
    assert not join._stays(emptied(Notice("a cloud", "k", "it goes"), 0), lambda: False, EVER_S)
