"""Real jobs on a played cluster of three nodes: pods and nodes go, the operator is killed, and every sample counts
once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_jobs import KubeRun, until

from everstep.platforms.kubernetes.kinds import name_of

pytest.importorskip("lightkube")
pytest.importorskip("cel")
pytestmark = [pytest.mark.processes, pytest.mark.platforms, pytest.mark.slow, pytest.mark.timeout(1500)]

SPOT = "karpenter.sh/disrupted"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[KubeRun]:
    made = KubeRun(tmp_path)
    yield made
    made.close()


MODES = {
    "ps": {
        "mode": "ParameterServer",
        "worker": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4},
        "ps": {"replicas": 2, "maxReplicas": 3},
        "psProtection": {"strategy": "Backup"},
    },
    "allreduce": {"mode": "AllReduce", "worker": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_job_survives_a_drained_and_a_dead_node(run: KubeRun, mode: str) -> None:
    run.write(10, sparse=mode == "ps")
    run.start_operator()
    run.submit(**{k: dict(v) if isinstance(v, dict) else v for k, v in MODES[mode].items()})  # type: ignore[attr-defined]
    run.whole()
    run.trained(200)

    def on(node: str) -> list[str]:
        pods = run.server.store.all("pods", "default")
        return [name_of(p) for p in pods if p["spec"].get("nodeName") == node and p["status"]["phase"] == "Running"]

    drained = run.pods("worker")[0]["spec"]["nodeName"]
    until(lambda: not run.nodes.drain(drained) and not on(drained), run.story)  # (budgets: it is asked again)
    run.whole()
    run.trained(200)
    run.server.merge(run.server.of("nodes"), "", drained, {"spec": {"unschedulable": False}})

    home = run.pods("master")[0]["spec"]["nodeName"]
    dead = next(p["spec"]["nodeName"] for p in run.pods() if p["spec"]["nodeName"] != home)
    lost = on(dead)
    run.nodes.kill_node(dead)
    until(lambda: not set(lost) & {name_of(p) for p in run.pods()}, run.story)
    run.whole()
    run.trained(200)
    run.ended_well()
    run.nodes.remove_node(dead)  # (else pods that wait there for their end are listed for ever)
    run.nothing_left()


@pytest.mark.parametrize("mode", MODES)
def test_a_job_survives_pods_nodes_and_its_operator(run: KubeRun, mode: str) -> None:
    run.write(20, sparse=mode == "ps")
    run.start_operator()
    run.submit(**{k: dict(v) if isinstance(v, dict) else v for k, v in MODES[mode].items()})  # type: ignore[attr-defined]
    run.whole()
    run.trained(200)

    killed = name_of(run.pods("worker")[0])
    run.nodes.kill_pod("default", killed)
    until(lambda: killed not in [name_of(p) for p in run.pods()], run.story)
    run.whole()
    run.trained(200)

    run.nodes.kill_pod("default", name_of(run.pods("master")[0]))
    until(lambda: (view := run.view()) is not None and view.master_incarnation >= 2, run.story)
    run.whole()
    run.trained(200)

    run.kill_operator()
    run.request("ScaleOut", "more", count=1)
    run.start_operator()
    assert run.request_ends("scaleouts", "more") == "Succeeded"
    run.whole()
    assert len(run.pods("worker")) == 3

    node = run.pods("worker")[0]["spec"]["nodeName"]
    run.nodes.taint(node, SPOT)
    until(lambda: not any(p["spec"]["nodeName"] == node for p in run.pods()), run.story)
    run.whole()
    run.trained(200)

    run.request("ScaleIn", "less", count=1)
    assert run.request_ends("scaleins", "less") == "Succeeded"
    run.whole()
    assert len(run.pods("worker")) == 2
    assert "story" in run.everstep("status", "k8s:story")
    run.ended_well()
    run.nothing_left()
