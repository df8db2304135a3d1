"""Workers whose replicas drift apart, in real processes: found within 50 steps and healed, or the job stops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_jobs import ReplicaRun
from test_allreduce_mistakes import BOTH, change, ends_with

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BY_HAND = "opt.step()\n    if job.step == 20 and job.slot == 1: model[0].weight.data[0, 0, 0, 0] += 0.001"
OWN_GRADIENT = "model[5].bias.grad = model[5].bias.grad + 0.01 * (job.step == 20 and job.slot == 1); opt.step()"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ReplicaRun]:
    made = ReplicaRun(tmp_path)
    made.write(rows=640, epochs=12, pause_s=0.0, batch=4)
    yield made
    made.close()


@pytest.mark.parametrize("edit", [BY_HAND, OWN_GRADIENT], ids=["weight", "gradient"])
def test_one_of_three_drifts_and_is_healed(run: ReplicaRun, edit: str) -> None:
    change(run, "opt.step()", edit)
    run.train(3, "--min-workers", "3").finished(states=3)
    said = re.findall(r"drifted apart: before step (\d+) the digest of '(\S+)'", run.workers_said())
    assert said and all(20 < int(step) <= 71 for step, _ in said), said


def test_of_two_the_job_stops_with_both_digests(run: ReplicaRun) -> None:
    change(run, "opt.step()", BY_HAND)
    run.train(2, *BOTH)
    line = ends_with(run, 6, "drifted apart", "'0.weight'", "on worker:0", "on worker:1", "--heal-from lowest")
    assert len(set(re.findall(r"[0-9a-f]{16} on worker", line))) == 2


def test_of_two_the_lowest_is_taken_where_the_setting_says_so(run: ReplicaRun) -> None:
    change(run, "opt.step()", BY_HAND)
    run.train(2, *BOTH, "--heal-from", "lowest").finished(states=2)
    assert "drifted apart" in run.workers_said()


def test_with_logical_workers_too(run: ReplicaRun) -> None:
    change(run, "opt.step()", BY_HAND)
    run.train(3, "--min-workers", "3", "--logical-workers", "6").finished(states=3)
    assert "drifted apart" in run.workers_said()
