"""The policy in docs/policies.md is the example's, is as short as promised, and makes plans that are taken."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.brain.policy_control import as_plan, refuse
from everstep.ids import Incarnation, NodeId, Slot
from everstep.master.policy import load
from everstep.model.observation import Observations, WorkerSeen
from everstep.model.plan import AdjustBatch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "throttled.py"


def test_the_policy_in_the_document_is_the_example() -> None:
    code = _blocks()[0]
    shown, stored = ast.parse(code), ast.parse(EXAMPLE.read_text())
    assert ast.unparse(shown.body) == ast.unparse(stored.body[1:])  # type: ignore[arg-type]
    assert len(code.splitlines()) <= 22


def test_a_shipped_one_with_other_settings_is_a_policy(tmp_path: Path) -> None:
    (tmp_path / "with_other_settings.py").write_text(_blocks()[1])
    choose: Any = load("with_other_settings:choose", tmp_path)
    plan, state = choose(Observations(at=1.0), None)
    assert plan is None and choose(Observations(at=2.0), state)[0] is None


def _blocks() -> list[str]:
    """What is Python in the document."""
    found: list[str] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "policies.md").read_text(), re.M | re.S)
    return found


def test_it_takes_work_from_the_throttled_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    choose: Any = load("throttled:choose", EXAMPLE.parent)
    workers = tuple(
        WorkerSeen(slot=Slot(i), incarnation=Incarnation(1), node=NodeId("n"), share=32, throttled_share=0.5 * i)
        for i in range(2)
    )
    seen = Observations(at=1.0, mode="allreduce", global_batch=64, workers=workers)
    plan, state = choose(seen, None)
    assert refuse(as_plan(plan), seen) == "" and isinstance(plan.actions[0], AdjustBatch)
    assert plan.actions[0].batch == {0: 43, 1: 21}
    assert choose(seen, state) == (None, state)
    assert choose(msgspec.structs.replace(seen, global_batch=0), None) == (None, None)
