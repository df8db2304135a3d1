"""A policy of one's own in a real job: steps divided anew and a worker replaced while the group trains on."""

from __future__ import annotations

import json
import re

import pytest
from local_jobs import until
from replica_jobs import ReplicaRun

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

MINE = """
from everstep.model.decision import Decision
from everstep.model.plan import AdjustBatch, KillRestart, Plan

def choose(seen, state):
    if len(seen.workers) < 2 or seen.pending or seen.restarts:
        return None, None
    a, b = seen.workers
    if b.share != 3:
        why = Decision("try", "to divide")
        return Plan(actions=(AdjustBatch(batch={0: seen.global_batch - 3, 1: 3}),), decision=why), None
    kill = KillRestart(role="worker", slot=1, incarnation=b.incarnation)
    return Plan(actions=(kill,), decision=Decision("try", "to replace")), None
"""


RUN = ReplicaRun


def test_steps_are_divided_anew_and_a_worker_is_replaced(run: ReplicaRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_WINDOW_S", "0.3")
    run.write(rows=960, epochs=6, pause_s=0.04)
    (run.script.parent / "mine.py").write_text(MINE)
    run.train(2, "--policy", "mine:choose")
    run.pid(1, at_least=2)
    until(lambda: len(re.findall("group [0-9]+: worker:1 entered", run.text())) > 0, why=run.story)
    run.hurry()
    run.finished(states=2)
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    told = [(e["action"], e["reason"]) for e in events]
    assert ("divide steps", "to divide") in told and ("try", "to replace") in told, told
    assert any(
        e["member"] == "worker:1" and e["action"] == "joined" and e["inputs"]["incarnation"] == 2 for e in events
    )
    assert run.everstep("replay", str(run.run_dir))[0] == 0
