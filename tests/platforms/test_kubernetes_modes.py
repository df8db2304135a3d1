"""Real jobs on a played cluster: pods that start together or not at all, and a model that is cut into stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_jobs import KubeRun, until

from everstep.platforms.kubernetes.kinds import Gang, name_of

pytest.importorskip("lightkube")
pytest.importorskip("cel")
pytestmark = [pytest.mark.processes, pytest.mark.platforms, pytest.mark.slow, pytest.mark.timeout(1200)]

STAGES = """
import os, time
import numpy as np, torch
import everstep as es
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

job = es.join()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
model = job.pipeline(net, schedule=Schedule1F1B, microbatches=2, loss_fn=nn.MSELoss())
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
x = np.random.default_rng(0).normal(size=(4000, 4)).astype(np.float32)
for batch in job.steps(job.loader({"x": x, "y": x[:, :1] * 2}, batch_size=20, epochs=EPOCHS)):
    opt.zero_grad()
    loss = model.step(batch["x"], target=batch["y"])
    opt.step()
    job.report(loss=loss)
    if not os.path.exists(HURRY):
        time.sleep(0.2)
"""


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KubeRun]:
    made = KubeRun(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


def condition(run: KubeRun, which: str) -> str:
    found = {c["type"]: c for c in (run.job.get("status") or {}).get("conditions") or []}
    return str((found.get(which) or {}).get("message", "")) if (found.get(which) or {}).get("status") == "True" else ""


@pytest.mark.parametrize("run", [{"gang": Gang.VOLCANO, "pods_max": 1}], indirect=True)
def test_a_job_that_needs_four_pods_starts_when_there_is_room_for_four(run: KubeRun) -> None:
    """Three nodes of one pod each: nobody starts, also not the master. A fourth one, and all do."""
    run.write(4)
    run.start_operator()
    run.submit(
        mode="ParameterServer",
        worker={"replicas": 1, "minReplicas": 1},
        ps={"replicas": 2},
        psProtection={"strategy": "Backup"},
        scheduling={"gang": "Volcano"},
        elasticity={"maxWaitSeconds": 3600},
    )
    until(lambda: "0 of the 4 pods" in condition(run, "Waiting"), run.story)
    until(lambda: len(run.server.store.all("pods")) == 4, run.story)
    assert run.phase == "Waiting" and not run.nodes._running
    assert "Waiting: 0 of the 4 pods that the job needs have a node" in run.everstep("status", "k8s:story")
    run.nodes.add_node("node-4")
    run.whole()
    run.trained(200)
    run.nodes.kill_pod("default", name_of(run.pods("ps")[0]))  # a lost pod comes back without the others being asked
    run.trained(200)
    run.whole()
    run.ended_well()
    until(lambda: not run.server.store.all("podgroups"), run.story)  # (it keeps no room in a queue)
    run.nothing_left()


@pytest.mark.parametrize("run", [{"gang": Gang.SCHEDULER_PLUGINS, "pods_max": 1}], indirect=True)
def test_a_gang_that_finds_no_room_gives_back_what_it_holds(run: KubeRun) -> None:
    run.write(4, sparse=False)
    run.start_operator()
    run.submit(
        mode="AllReduce",
        worker={"replicas": 3, "minReplicas": 3},
        scheduling={"gang": "SchedulerPlugins"},
        elasticity={"maxWaitSeconds": 5},
    )
    until(lambda: run.phase == "Suspended", run.story)
    assert not run.server.store.all("pods") and not run.server.store.all("podgroups"), run.story()
    run.nodes.add_node("node-4")
    run.everstep("unsuspend", "k8s:story")
    run.whole()
    run.ended_well()
    run.nothing_left()


def test_a_model_in_stages_survives_a_pod_and_the_master(run: KubeRun) -> None:
    text = STAGES.replace("EPOCHS", "8").replace("HURRY", repr(str(run.hurry_file)))
    run.script.write_text(text)
    run.start_operator()
    run.submit(mode="Pipeline", stages=2, worker={"replicas": 2, "minReplicas": 1, "maxReplicas": 3})
    run.whole()
    run.trained(200)
    assert len(run.pods("worker")) == 2, "a pod is a replica: it has all stages"
    run.nodes.kill_pod("default", name_of(run.pods("worker")[0]))
    run.trained(200)
    run.whole()
    run.nodes.kill_pod("default", name_of(run.pods("master")[0]))
    until(lambda: (view := run.view()) is not None and view.master_incarnation >= 2, run.story)
    run.trained(200)
    run.everstep("scale", "k8s:story", "--workers", "3")
    run.whole()
    assert len(run.pods("worker")) == 3
    run.ended_well()
    run.nothing_left()
