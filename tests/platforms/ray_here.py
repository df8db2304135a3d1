"""A Ray of this machine for tests: several nodes, each with its own raylet."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_LOOK = """
import ray, sys, json
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
groups = [e["name"] for e in placement_group_table().values() if e["state"] != "REMOVED"]
print("answer", json.dumps([groups, [a["name"] for a in list_named_actors(all_namespaces=True)]]))
"""
_CLAIM = """
import json, sys
from ray._private import ray_constants
from ray._raylet import GcsClient
gcs = GcsClient(address=sys.argv[1])
where = (b"CLUSTER_METADATA", ray_constants.KV_NAMESPACE_CLUSTER)
said = json.loads(gcs.internal_kv_get(*where))
wanted = json.loads(sys.argv[2])
gcs.internal_kv_put(where[0], json.dumps({**said, **wanted}).encode(), True, where[1])
print("answer", json.dumps({key: said[key] for key in wanted}))
"""
_DRAIN = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
gcs = ray._private.worker.global_worker.gcs_client
print("answer", gcs.drain_node(sys.argv[2], 2, "taken back", int((time.time() + float(sys.argv[3])) * 1000)))
"""


def asked(code: str, *words: str) -> str:
    """Run ``code`` in a process of its own; return what it printed behind the word "answer". Ray prints lines of its
    own to the same output whenever a machine is lost or slow, so the answer may be any of the lines."""
    argv = [sys.executable, "-c", code, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert done.returncode == 0 and len(answers) == 1, done.stdout + done.stderr
    return answers[0].removeprefix("answer ")


class RayHere:
    """Runs from its making to ``close``. The head has no CPUs: jobs are on the other nodes. ``jobs``: it takes those of
    ``ray job submit``, at ``jobs_at``."""

    def __init__(self, nodes: int = 3, cpus: int = 2, jobs: bool = False) -> None:
        from ray.cluster_utils import Cluster

        more: dict[str, Any] = {"include_dashboard": jobs, "object_store_memory": 80 << 20}
        self.jobs_at = ""
        if jobs:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                more |= {"dashboard_host": "127.0.0.1", "dashboard_port": free.getsockname()[1]}
            self.jobs_at = f"http://127.0.0.1:{more['dashboard_port']}"
        with pytest.MonkeyPatch.context() as patch:  # a job of Ray finds the commands of this Python
            patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
            self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **more})
        self._cpus = cpus
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=self._cpus, object_store_memory=80 << 20))

    def kill_node(self, node_id: str = "") -> None:
        """Lose a machine without a word."""
        lost = next(n for n in self.nodes if node_id in ("", n.node_id))
        self.nodes.remove(lost)
        self.cluster.remove_node(lost, allow_graceful=False)

    def job_state(self, job: str) -> str:
        """Return the state of a submitted job: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
        from ray.job_submission import JobSubmissionClient

        return str(JobSubmissionClient(self.jobs_at).get_job_status(job).value)

    def drain(self, node_id: str, in_s: float) -> str:
        return self._ask(_DRAIN, node_id, str(in_s))

    @contextlib.contextmanager
    def claiming(self, **versions: str) -> Iterator[None]:
        """Have the cluster say for a while that it was started by others: ``ray_version``, ``python_version``."""
        real = self._ask(_CLAIM, json.dumps(versions))
        yield
        self._ask(_CLAIM, real)

    def left(self) -> str:
        """Return the placement groups and named actors that are there, as JSON."""
        return self._ask(_LOOK)

    def job(self, *words: str, cwd: Path | None = None) -> str:
        """Run ``ray job WORDS``; return what it printed."""
        env = {**os.environ, "RAY_ADDRESS": self.jobs_at}
        argv = [sys.executable, "-m", "ray.scripts.scripts", "job", *words]
        done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _ask(self, code: str, *words: str) -> str:
        return asked(code, self.address, *words)

    def close(self) -> None:
        self.cluster.shutdown()
