"""Puts a played cluster together: the API server, its nodes, our kinds."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from everstep.platforms.kubernetes.crds import definitions
from everstep.platforms.kubernetes.demo import gang_schedulers
from everstep.platforms.kubernetes.demo.api_http import ApiHttp
from everstep.platforms.kubernetes.demo.api_server import CRDS, ApiServer
from everstep.platforms.kubernetes.demo.pod_runner import PODS_MAX, PodRunner
from everstep.platforms.kubernetes.kinds import Gang
from everstep.platforms.kubernetes.lightkube_client import LightkubeClient, kubeconfig_for

NAMESPACE = "default"
_HANDED_ON = ("HOME", "TMPDIR", "PYTHONPATH", "EVERSTEP_TEST_FORKSERVER", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")


class DemoCluster:
    """Is a cluster on this machine until it is left. ``kubeconfig``: a file that leads to it. ``gang``: its scheduler
    of groups. ``pods_max``: pods of one node."""

    def __init__(
        self, folder: Path, nodes: tuple[str, ...], port: int = 0, gang: Gang = Gang.VOLCANO, pods_max: int = PODS_MAX
    ) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.server = ApiServer()
        for definition in definitions():
            self.server.create(self.server.of(CRDS), "", definition)
        gang_schedulers.install(self.server, gang)
        env = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
        self.runner = PodRunner(self.server, self.folder, nodes, env, gang, pods_max)
        self.http = ApiHttp(self.server, None, self.runner.logs, port)
        self.kubeconfig = self.folder / "kubeconfig"
        kubeconfig_for(self.http.url, self.kubeconfig, NAMESPACE)
        self._clients: list[LightkubeClient] = []

    def __repr__(self) -> str:
        return f"<cluster at {self.http.url}>"

    def client(self, token: str = "") -> LightkubeClient:
        """Return another client."""
        self._clients.append(LightkubeClient.connect(url=self.http.url, token=token or "demo"))
        return self._clients[-1]

    def close(self) -> None:
        """End everything that runs here."""
        self.runner.close()
        self.http.close()
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
