"""Real jobs on a real Ray of three nodes: nodes are killed and drained, ``everstep run`` is killed, and every sample
counts once."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from cluster_jobs import ClusterRun, until
from ray_here import RayHere, asked

pytest.importorskip("ray", reason="Ray is not installed: pip install 'everstep[ray]'")
pytestmark = [pytest.mark.processes, pytest.mark.platforms, pytest.mark.slow, pytest.mark.timeout(1500)]
MODES = {
    "ps": ("--workers", "3", "--ps", "3", "--parity", "1+1"),
    "allreduce": ("--mode", "allreduce", "--workers", "3"),
}


@pytest.fixture(scope="module")
def ray() -> Iterator[RayHere]:
    here = RayHere(3)
    yield here
    here.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ClusterRun]:
    made = ClusterRun(tmp_path, {})
    yield made
    made.close()


def machine(run: ClusterRun, node: str) -> str:
    view = run.view()
    assert view is not None
    return next(n.machine for n in view.nodes if n.node == node)


@pytest.mark.parametrize("mode", MODES)
def test_a_job_survives_nodes_and_its_everstep_run(run: ClusterRun, ray: RayHere, mode: str) -> None:
    run.write(16, sparse=mode == "ps")
    run.start("--on", f"ray:{ray.address}", "--nodes", "3", *MODES[mode])
    run.whole(3)
    run.trained(200)

    first = run.nodes()[0]
    ray.kill_node(machine(run, first))
    until(lambda: first not in run.nodes(), run.story)
    run.trained(200)
    ray.add()
    run.whole(3)
    run.trained(200)

    before = run.nodes()
    run.kill()
    run.start()
    run.whole(3)
    run.trained(200)
    assert run.nodes() == before, "the nodes stayed"

    second, other = run.nodes()[0], machine(run, run.nodes()[0])
    ray.drain(other, 90)
    until(lambda: second not in run.nodes(), run.story)
    ray.kill_node(other)
    ray.add()
    run.whole(3)
    run.trained(200)

    less = ("--workers", "2", "--ps", "2") if mode == "ps" else ("--workers", "2")
    run.everstep("scale", str(run.run_dir), *less)
    run.whole(2)
    run.everstep("scale", str(run.run_dir), "--workers", "3")
    run.whole(3)
    run.ends_well()
    assert ray.left() == "[[], []]"


def test_an_actor_whose_everstep_run_never_comes_back_goes(ray: RayHere) -> None:
    code = """
import ray, sys, time
from everstep.platforms.ray_agent import RayAgent
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
ray.init(address=sys.argv[1], namespace="everstep", log_to_driver=False, configure_logging=False)
group = placement_group([{"CPU": 1}], name="orphans.1", lifetime="detached")
options = {"name": "orphans.1.0.n", "lifetime": "detached", "num_cpus": 1, "scheduling_strategy": In(group, 0)}
words = ["--join", "127.0.0.1:1", "--node", "n"]
actor = ray.remote(RayAgent).options(max_concurrency=4, **options).remote(words, b"x", "n", "orphans.1", 1.0)
print("answer", ray.get(actor.ended.remote()))
"""
    assert "(" in asked(code, ray.address)
    until(lambda: ray.left() == "[[], []]", ray.left)


def test_the_autoscaler_is_asked_where_capacity_lacks_and_asked_no_more_at_the_end(ray: RayHere) -> None:
    """No autoscaler runs here: what it reads is looked at."""
    code = """
import ray, sys, json
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL as WISH
from ray.experimental.internal_kv import _internal_kv_get
from everstep.ids import NodeId
from everstep.platforms.ray_cluster import RayCluster, connect_ray
connect_ray(sys.argv[1])
words = lambda node: ["--join", "127.0.0.1:1", "--node", node]
cluster = RayCluster("wish", 2, 0, words, lambda: b"x", lambda line: None)
def wish():
    return [each.get("resources", each) for each in json.loads(_internal_kv_get(WISH) or b"[]")]
free, nodes = sum(offer.count for offer in cluster.offers()), [NodeId(f"n{i}") for i in range(9)]
cluster.add(nodes[:1])
seen = [free, wish()]
cluster.add(nodes[1:free + 2])
seen.append(len(wish()))
cluster.cancel(nodes[0])
seen += [len(wish()), wish()[0]]
cluster.close()
print("answer", json.dumps([*seen, wish()]))
"""
    free, none, more, fewer, bundle, withdrawn = json.loads(asked(code, ray.address))
    assert free == 3 and none == [] and more == free + 2 and fewer == free + 1
    assert bundle == {"CPU": 2} and withdrawn == []
    until(lambda: ray.left() == "[[], []]", ray.left)


def refused(run: ClusterRun, *words: str) -> str:
    run.write(1, sparse=False)
    argv = [sys.executable, "-m", "everstep.cli", "run", *words, str(run.script)]
    done = subprocess.run(argv, env=run.env, cwd=run.folder, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode in (2, 4) and len(lines) == 1, done.stderr
    assert not (run.folder / "runs").exists()
    return lines[0]


@pytest.mark.parametrize(
    ("other", "advice"),
    [
        ({"ray_version": "2.999.0"}, "pip install 'ray==2.999.0'"),
        ({"python_version": "3.99.1"}, "run everstep with Python 3.99.1, as the cluster does"),
        ({"ray_version": "2.999.0", "python_version": "3.99.1"}, "run everstep with Python 3.99.1 and Ray 2.999.0"),
        ({"ray_version": "2.40.0"}, "give the cluster Ray 2.50 or newer"),
    ],
    ids=lambda each: " ".join(each.values()) if isinstance(each, dict) else "",
)
def test_a_cluster_of_another_ray_or_python_is_one_line(
    run: ClusterRun, ray: RayHere, other: dict[str, str], advice: str
) -> None:
    """Ray itself refuses: the cluster says that it was started by others, and Ray's own words are read."""
    own = {"ray_version": metadata.version("ray"), "python_version": platform.python_version()}
    there = {**own, **other}
    with ray.claiming(**other):
        line = refused(run, "--on", f"ray:{ray.address}")
    assert f"Ray {there['ray_version']} on Python {there['python_version']}" in line
    assert f"here is Ray {own['ray_version']} on Python {own['python_version']}" in line and advice in line
    assert ray.left() == "[[], []]"
    assert not list(run.folder.glob("run*")), "no run directory was made"


def test_no_such_address(run: ClusterRun) -> None:
    assert "nothing answers at 127.0.0.1:1" in refused(run, "--on", "ray:127.0.0.1:1")
    assert "expected ray:HOST:PORT" in refused(run, "--on", "ray:somewhere")
