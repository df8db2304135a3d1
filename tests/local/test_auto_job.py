"""``everstep run --workers auto --ps auto``: a real job begins with one of each and is scaled while it trains."""

from __future__ import annotations

import json

import pytest
from local_jobs import Run, until

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_job_grows_from_one_worker_and_stays_exact(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes 0.1 s of the script's own time, so more workers are faster whatever the machine does."""
    monkeypatch.setenv("EVERSTEP_WINDOW_S", "2")
    run.write(rows=60_000, epochs=1, pause_s=0.1, batch=20)
    run.start("--workers", "auto", "--ps", "auto", "--max-workers", "3", "--max-ps", "2")

    def grown() -> bool:
        status = run.status()
        return status is not None and sum(m.role == "worker" and m.up for m in status.members) == 3

    until(grown, 150.0, why=run.story)
    run.hurry()
    run.ended_well()
    assert "auto: begins with 1 workers and 1 ps (no earlier job says more); --max-workers 3, --max-ps 2" in run.text()
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    changes = [e for e in events if e["action"] == "scale" and e["inputs"].get("policy") == "auto"]
    assert 1 <= len(changes) <= 6
    assert "what each worker computes" in changes[0]["reason"] and changes[0]["inputs"]["changes_left"] == 5
    assert not [e for e in events if e["action"] == "disable the policy"], "it makes no impossible plan"
    assert run.everstep("replay", str(run.run_dir))[0] == 0
