"""A job on machines that come and go as a cloud recorded it: real agents, killed as the recording says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_jobs import processes_of, until

from everstep.brain.events import CapacityChanged, SpotChosen
from everstep.cli.replay import replay
from everstep.model.capacity import CapacityStep
from everstep.model.member import Role
from everstep.model.spot_choice import SpotChoice
from everstep.storage.journal import read_journal

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

RECORDED = Path(__file__).parents[2] / "benchmarks" / "traces" / "spot"


def steps(run: Run) -> list[CapacityStep]:
    facts = (event.fact for _, event, _ in read_journal(run.run_dir / "journal.sqlite"))
    return [fact.step for fact in facts if isinstance(fact, CapacityChanged)]


@pytest.mark.parametrize("lead", ["0s", "5s"])
@pytest.mark.parametrize("mode", [("--ps", "2", "--parity", "1+1"), ("--mode", "allreduce", "--ps", "1")])
def test_a_job_under_a_recorded_cloud_ends_exactly(run: Run, mode: tuple[str, ...], lead: str) -> None:
    run.write(epochs=60, pause_s=0.3)
    trace = f"trace:{RECORDED / 'us-west-2c_v100_1.json.gz'}"
    played = ("--speed", "60", "--quiet", "8s", "--lead", lead, "--capacity-nodes", "3")
    run.start("--workers", "1", *mode, "--capacity", trace, *played)
    run.alive(Role.WORKER, 0)
    popen = run.popen
    assert popen is not None
    gone = CapacityStep.TAKEN_BACK
    until(lambda: steps(run).count(gone) >= 12 or popen.poll() is not None, 500.0, run.story)
    assert popen.poll() is None, run.story()
    run.hurry()
    run.ended_well(300)
    seen = steps(run)
    assert seen.count(gone) >= 12
    assert (CapacityStep.WARNED in seen) is (lead != "0s")
    assert replay(run.run_dir).ok
    nodes = list((run.run_dir / "nodes").iterdir())
    until(lambda: not any(processes_of(node) for node in nodes), 30.0, run.story)


def test_the_interval_between_checkpoints_follows_a_recorded_cloud(run: Run) -> None:
    run.write(epochs=60, pause_s=0.2)
    trace = f"trace:{RECORDED / 'us-west-2c_v100_1.json.gz'}"
    played = ("--speed", "60", "--quiet", "5s", "--capacity-nodes", "3", "--spot-policy", "hazard")
    run.start("--workers", "1", "--ps", "1", "--checkpoint-every", "600s", "--capacity", trace, *played)
    run.alive(Role.WORKER, 0)

    def chosen() -> list[SpotChoice]:
        facts = (event.fact for _, event, _ in read_journal(run.run_dir / "journal.sqlite"))
        return [fact.choice for fact in facts if isinstance(fact, SpotChosen)]

    until(lambda: any(choice.seen.reclaims >= 3 for choice in chosen()), 300.0, run.story)
    run.hurry()
    run.ended_well(300)
    last = chosen()[-1]
    assert not last.failed and 0 < last.interval_s < 600.0 and 0 < last.seen.held_s < 3600.0
    assert replay(run.run_dir).ok
