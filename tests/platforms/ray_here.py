"""A Ray of this machine for tests: several nodes, each with its own raylet."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

_LOOK = """
import ray, sys, json
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
groups = [e["name"] for e in placement_group_table().values() if e["state"] != "REMOVED"]
print(json.dumps([groups, [a["name"] for a in list_named_actors(all_namespaces=True)]]))
"""
_DRAIN = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
gcs = ray._private.worker.global_worker.gcs_client
print(gcs.drain_node(sys.argv[2], 2, "taken back", int((time.time() + float(sys.argv[3])) * 1000)))
"""


class RayHere:
    """Runs from its making to ``close``. The head has no CPUs: jobs are on the other nodes."""

    def __init__(self, nodes: int = 3, cpus: int = 2) -> None:
        from ray.cluster_utils import Cluster

        more = {"include_dashboard": False, "object_store_memory": 80 << 20}
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

    def drain(self, node_id: str, in_s: float) -> str:
        return self._ask(_DRAIN, node_id, str(in_s))

    def left(self) -> str:
        """Return the placement groups and named actors that are there, as JSON."""
        return self._ask(_LOOK).splitlines()[-1]

    def _ask(self, code: str, *words: str) -> str:
        argv = [sys.executable, "-c", code, self.address, *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        self.cluster.shutdown()
