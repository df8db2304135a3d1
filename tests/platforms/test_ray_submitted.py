"""``ray job submit -- everstep run --on ray``: a job of Ray runs the job, on a real Ray of three nodes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import ClusterRun, until
from ray_here import RayHere

from everstep.cli.display import read_summary
from everstep.monitor.audit import audit

pytest.importorskip("ray", reason="Ray is not installed: pip install 'everstep[ray]'")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.platforms,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None,
        reason="Ray's job server is not installed: pip install 'ray[default]'",
    ),
]

WAITS = ("--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}')
"""Ray kills a job that is stopped after 3 s, unless it is told to wait longer."""


class SubmittedRun(ClusterRun):
    """Is one ``everstep run`` that is a job of Ray. Its script comes in the job's working directory."""

    def __init__(self, ray: RayHere, folder: Path, name: str) -> None:
        super().__init__(folder, {})
        self.ray, self.name = ray, name
        self.script = folder / "sources" / "train.py"
        self.script.parent.mkdir()

    def submit(self, *words: str) -> None:
        job = ("submit", "--no-wait", "--submission-id", self.name, "--working-dir", str(self.script.parent), *WAITS)
        run = ("everstep", "run", "--no-display", "--on", "ray", "--run-dir", str(self.run_dir), *words, "train.py")
        self.ray.job(*job, "--", *run)
        self.script.unlink()  # what runs is Ray's copy

    def story(self) -> str:
        return super().story() + self.ray.job("logs", self.name)[-3000:]

    def ended(self, state: str) -> None:
        over = ("SUCCEEDED", "FAILED", "STOPPED")
        until(lambda: self.ray.job_state(self.name) in over, self.story, 300)
        assert self.ray.job_state(self.name) == state, self.story()
        until(lambda: self.ray.left() == "[[], []]", self.ray.left)


@pytest.fixture(scope="module")
def ray() -> Iterator[RayHere]:
    here = RayHere(3, jobs=True)
    yield here
    here.close()


def test_a_submitted_job_survives_a_node(ray: RayHere, tmp_path: Path) -> None:
    run = SubmittedRun(ray, tmp_path, "survives")
    run.write(8)
    run.submit("--nodes", "3", "--workers", "3", "--ps", "3", "--parity", "1+1")
    run.whole(3)
    run.trained(200)

    view = run.view()
    assert view is not None
    first = next(node for node in view.nodes if node.alive and node.node != "node0")
    ray.kill_node(first.machine)
    until(lambda: first.node not in run.nodes(), run.story)
    run.trained(200)
    ray.add()
    run.whole(3)

    run.hurry_file.touch()
    run.ended("SUCCEEDED")
    summary = read_summary(run.run_dir)
    assert summary is not None and summary.exit_code == 0, run.story()
    report = audit(run.run_dir)
    assert report.ok, report.text() + run.story()
    run.paid_once()


def test_a_submitted_job_that_is_stopped_leaves_nothing(ray: RayHere, tmp_path: Path) -> None:
    run = SubmittedRun(ray, tmp_path, "stopped")
    run.write(1000)
    run.submit("--nodes", "2", "--workers", "2", "--ps", "2", "--parity", "1+1")
    run.whole(2)
    run.trained(100)
    ray.job("stop", run.name)
    run.ended("STOPPED")
