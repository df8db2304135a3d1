"""What real jobs on a played cluster leave outlives their pods: it is written while operators and pods are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_jobs import KubeRun, until

from everstep.platforms.kubernetes.demo.played_cluster import NAMESPACE
from everstep.platforms.kubernetes.kinds import Condition, name_of
from everstep.storage.kept_run import INDEX
from everstep.storage.suspended_job import INDEX as SUSPENDED_INDEX

pytest.importorskip("lightkube")
pytest.importorskip("cel")
pytestmark = [pytest.mark.processes, pytest.mark.platforms, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[KubeRun]:
    made = KubeRun(tmp_path)
    yield made
    made.close()


def begin(run: KubeRun) -> Path:
    out = run.folder / "out"
    run.write(12)
    run.start_operator()
    run.submit(
        mode="ParameterServer",
        out=str(out),
        worker={"replicas": 2, "minReplicas": 1, "price": {"onDemandHourly": "3.60"}},
        ps={"replicas": 2, "price": {"onDemandHourly": "3.60"}},
        psProtection={"strategy": "Backup"},
    )
    run.whole()
    run.trained(200)
    return out


def said(*words: str, code: int = 0) -> str:
    """Return what a command prints that has no cluster."""
    argv = [sys.executable, "-m", "everstep.cli", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def written(run: KubeRun, occasion: str) -> bool:
    return str(((run.job.get("status") or {}).get("out") or {}).get("of", "")).startswith(occasion)


def writers(run: KubeRun) -> list[str]:
    pods = run.server.store.all("pods", NAMESPACE)
    return [name_of(p) for p in pods if "-out-" in name_of(p) and p["status"].get("phase") == "Running"]


def gone(run: KubeRun) -> bool:
    return run.server.store.get("elasticjobs", NAMESPACE, run.name) is None


def test_a_suspension_and_the_end_are_written_although_operator_and_writer_are_killed(run: KubeRun) -> None:
    out = begin(run)
    run.everstep("suspend", "k8s:story")
    until(lambda: written(run, "Suspended"), run.story)
    assert "suspended" in said("status", str(out))
    first = json.loads((out / INDEX).read_text())
    run.everstep("unsuspend", "k8s:story")
    run.whole()
    run.trained(100)

    run.hurry_file.touch()
    until(lambda: bool(writers(run)), run.story, timeout_s=400.0)
    run.kill_operator()
    for name in writers(run):
        run.nodes.kill_pod(NAMESPACE, name)
    run.start_operator()
    until(lambda: written(run, "Succeeded"), run.story)
    conditions = {c["type"]: c["status"] for c in run.job["status"]["conditions"]}
    assert conditions[Condition.OUT_WRITTEN] == "True", run.story()
    run.nothing_left()
    assert gone(run)

    assert "exactly once" in said("audit", str(out))
    shown = json.loads(said("status", str(out), "--json"))
    assert shown["phase"] == "done" and shown["cluster"]["status"]["phase"] == "Succeeded"
    assert float(json.loads(said("cost", str(out), "--json"))["cost"]["spent"]) > 0
    assert said("cost", str(out)).startswith("spent ")
    index = json.loads((out / INDEX).read_text())
    assert index["number"] > first["number"]
    names = [file[0] for file in index["files"]]
    assert any(name.startswith("nodes/story-worker-") for name in names), names
    assert not any("secret" in name for name in names)
    assert any((out / "model").iterdir()) and any((out / "checkpoints").iterdir())


def test_a_job_that_is_deleted_without_an_operator_is_written_before_it_goes(run: KubeRun) -> None:
    out = begin(run)
    run.kill_operator()
    run.server.delete(run.server.of("elasticjobs"), NAMESPACE, run.name)
    assert not gone(run)
    run.start_operator()
    until(lambda: gone(run), run.story_of_pods)
    until(lambda: not run.server.store.all("pods", NAMESPACE), run.story_of_pods)
    assert "suspended" in said("status", str(out))
    said("audit", str(out), code=10)
    assert (out / "checkpoints" / SUSPENDED_INDEX).exists(), "everstep unsuspend goes on from there"
