"""Fault points: where a process can be told to die, and what says so."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import faultpoints
from everstep.errors import ConfigError

SOURCE = Path(faultpoints.__file__).parent


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that this process would have got."""
    signals: list[int] = []
    monkeypatch.setattr(faultpoints.os, "kill", lambda pid, signo: signals.append(signo))
    yield signals
    monkeypatch.delenv(faultpoints.VARIABLE, raising=False)
    faultpoints.begin("", 0, 0)


def plant(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv(faultpoints.VARIABLE, words)


def test_the_named_member_dies_at_the_named_time(monkeypatch: pytest.MonkeyPatch, killed: list[int]) -> None:
    plant(monkeypatch, "ps:1:before_apply:3,worker:1.2:agree:1")
    faultpoints.begin("ps", 1, 7)
    assert faultpoints.armed("ps", 1) and not faultpoints.armed("ps", 0)
    for _ in range(2):
        faultpoints.reach("before_apply")
        faultpoints.reach("after_apply")
    assert killed == []
    faultpoints.reach("before_apply")
    assert killed == [9]


def test_others_and_other_lives_go_on(monkeypatch: pytest.MonkeyPatch, killed: list[int]) -> None:
    plant(monkeypatch, "ps:1.1:before_apply:1")
    for role, slot, life in (("ps", 1, 2), ("ps", 0, 1), ("worker", 1, 1)):
        faultpoints.begin(role, slot, life)
        assert not faultpoints.armed(role, slot)
        faultpoints.reach("before_apply")
    assert killed == []
    faultpoints.begin("ps", 1, 1)
    faultpoints.reach("before_apply")
    assert killed == [9]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ps:1:before_aply:1", "ps has before_apply, "),
        ("agent:1:agree:1", "there are ps, worker, master"),
        ("ps:1:before_apply", "give ROLE:SLOT"),
        ("ps:x:before_apply:1", "give ROLE:SLOT"),
        ("ps:1:before_apply:0", "TIMES must be at least 1"),
    ],
)
def test_a_fault_that_cannot_be_read_is_named(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"EVERSTEP_FAULT={re.escape(words)}: {says}"):
        faultpoints.planted(f"ps:0:after_ack:2,{words}")


def test_every_point_is_in_the_code_once_or_more_and_every_one_in_the_code_is_listed() -> None:
    text = "\n".join(p.read_text() for p in SOURCE.rglob("*.py") if p.name != "faultpoints.py")
    found = {
        name for call in re.findall(r"faultpoints\.reach\(([^)]*)\)", text) for name in re.findall(r'"(\w+)"', call)
    }
    assert found == {point for points in faultpoints.POINTS.values() for point in points}
    assert faultpoints.VARIABLE not in text, "one module reads it"
    assert faultpoints.VARIABLE not in os.environ
