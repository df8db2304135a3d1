"""The brain is made of concerns: who handles what, how they settle, and that only their composition knows modes."""

from __future__ import annotations

import ast
import typing
from pathlib import Path

import pytest

from everstep.brain.brain import MAX_PASSES, Brain
from everstep.brain.concerns.composition import Concerns
from everstep.brain.events import Event, FactType, GroupSynced, MasterStarted, Note, Refused, Reply, ShardAsked
from everstep.brain.job import JobRules
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation
from everstep.model.decision import Decision

BRAIN = Path(__file__).resolve().parents[2] / "src" / "everstep" / "brain"
SPECS = {"ps": JobSpec(workers=2, ps=2), "allreduce": JobSpec(mode="allreduce", workers=2, ps=0)}


def begun(spec: JobSpec, settles: bool = True) -> Brain:
    brain = Brain()
    brain.handle(Event(0.0, MasterStarted(Incarnation(1), spec, settles)))
    return brain


def test_every_fact_has_one_handler_in_some_mode() -> None:
    handled = set()
    for spec in SPECS.values():
        rows = [kind for concern in begun(spec).concerns.all for kind in concern.handlers()]
        assert len(rows) == len(set(rows)), "two concerns handle one kind of fact"
        handled |= set(rows)
    assert handled == set(typing.get_args(FactType))


def test_a_fact_of_another_mode_is_refused_and_changes_nothing() -> None:
    for mode, fact in (("ps", GroupSynced(1)), ("allreduce", ShardAsked(0, 1, 0))):
        brain = begun(SPECS[mode])
        before = brain.snapshot()
        (answer,) = brain.handle(Event(1.0, fact))
        assert isinstance(answer, Reply) and isinstance(answer.answer, Refused) and "another mode" in str(answer)
        assert brain.snapshot() == before


def test_a_restored_brain_has_the_concerns_of_its_job() -> None:
    for spec in SPECS.values():
        brain = begun(spec)
        restored = Brain.restore(brain.snapshot())
        assert [type(c) for c in restored.concerns.all] == [type(c) for c in brain.concerns.all]


def test_concerns_settle_until_none_of_them_has_anything_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Note("", Decision("again", "and again"))
    left = [3]

    def some(self: object, event: Event, out: object) -> list[object]:
        left[0] -= 1
        return [note] if left[0] >= 0 else []

    for settles, passes in ((True, 3), (False, 1)):  # (False: what masters of before this release recorded)
        brain, left[0] = begun(SPECS["ps"], settles), 3
        monkeypatch.setattr(type(brain.concerns.placement), "settle", some)
        brain.concerns.compose()
        assert brain.handle(Event(1.0, MasterStarted(Incarnation(1), SPECS["ps"]))) == [note] * passes
    left[0] = MAX_PASSES + 1
    brain.job.rules = JobRules(settles=True)
    with pytest.raises(RuntimeError, match=f"after MasterStarted the brain does not settle in {MAX_PASSES} passes"):
        brain.handle(Event(1.0, MasterStarted(Incarnation(1), SPECS["ps"])))


def test_only_the_composition_of_concerns_asks_for_the_mode() -> None:
    """Of a job; an observation that a policy is shown names the mode, too."""
    asks = set()
    for path in BRAIN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("mode", "replicated"):
                asks.add(f"{path.relative_to(BRAIN)}: {ast.unparse(node)}")
            if isinstance(node, ast.Attribute) and node.attr == "grouped" and "spec" in ast.unparse(node):
                asks.add(f"{path.relative_to(BRAIN)}: {ast.unparse(node)}")
    assert asks == {"concerns/composition.py: self.state.job.spec.grouped", "policy_control.py: seen.mode"}


def test_all_concerns_are_asked_for_their_invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in SPECS.values():
        brain = begun(spec)
        asked: list[type] = []
        for kind in {type(c) for c in brain.concerns.all}:
            monkeypatch.setattr(kind, "validate", lambda self, asked=asked: asked.append(type(self)))
        brain.validate()
        assert len(asked) == len(brain.concerns.all)
        assert isinstance(brain.concerns, Concerns)
        monkeypatch.undo()
