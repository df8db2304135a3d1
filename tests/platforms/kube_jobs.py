"""Real jobs on a played cluster: a server in memory, pods that are processes, an operator that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import watched_jobs
from watched_jobs import WatchedJob

from everstep.monitor.audit import audit
from everstep.platforms.kubernetes.demo.played_cluster import NAMESPACE, DemoCluster
from everstep.platforms.kubernetes.kinds import API_VERSION, Gang, Object, name_of
from everstep.platforms.kubernetes.pods import facts_of

until = partial(watched_jobs.until, timeout_s=240.0)


class KubeRun(WatchedJob):
    """Is a job on a played cluster of three nodes, which take ``pods_max`` pods each."""

    def __init__(self, folder: Path, name: str = "story", gang: Gang = Gang.VOLCANO, pods_max: int = 30) -> None:
        super().__init__(folder, folder / "cluster" / "claims" / NAMESPACE / f"{name}-master" / "job")
        self.name = name
        self.cluster = DemoCluster(folder / "cluster", ("node-1", "node-2", "node-3"), gang=gang, pods_max=pods_max)
        self.server, self.nodes = self.cluster.server, self.cluster.runner
        self.operator: subprocess.Popen[bytes] | None = None
        self.images: dict[str, dict[str, str]] = {}  # by role: what differs in the environment of its image

    # ------------------------------------------------------------ what a user does

    def submit(self, **spec: Any) -> None:
        for role in ("worker", "ps"):
            if role in spec:
                env = [{"name": name, "value": value} for name, value in self.images.get(role, {}).items()]
                container = {"name": "main", "image": "everstep:test", "env": env}
                spec[role]["template"] = {"spec": {"containers": [container]}}
        body = {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": {"name": self.name}}
        body["spec"] = {"script": str(self.script), **spec}
        self.server.create(self.server.of("elasticjobs"), NAMESPACE, body)

    def everstep(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "everstep.cli", *words],
            env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start_operator(self) -> None:
        with (self.folder / "operator.log").open("ab") as out:
            self.operator = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli", "operator", "--no-lease"],
                env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)},
                stdout=out,
                stderr=out,
            )

    def kill_operator(self) -> None:
        if self.operator is not None:
            self.operator.kill()
            self.operator.wait(30)
            self.operator = None

    def request(self, kind: str, name: str, **spec: Any) -> None:
        of = self.server.of("scaleouts" if kind == "ScaleOut" else "scaleins")
        meta = {"name": name}
        body = {"apiVersion": API_VERSION, "kind": kind, "metadata": meta, "spec": {"jobName": self.name, **spec}}
        self.server.create(of, NAMESPACE, body)

    # ------------------------------------------------------------ what is seen

    @property
    def job(self) -> Object:
        found = self.server.store.get("elasticjobs", NAMESPACE, self.name)
        assert found is not None
        return found

    @property
    def phase(self) -> str:
        return str((self.job.get("status") or {}).get("phase", ""))

    def pods(self, role: str = "") -> list[Object]:
        """Return the pods that work."""
        out = []
        for pod in self.server.store.all("pods", NAMESPACE):
            facts = facts_of(pod)
            if facts is not None and facts.active and facts.ready and role in ("", facts.place):
                out.append(pod)
        return out

    def trained(self, more: int) -> None:
        """Wait until so many more samples are trained."""
        start = 0
        until(lambda: self.view() is not None, self.story)
        start = self.samples()
        until(lambda: self.samples() >= start + more, self.story)

    def whole(self) -> None:
        """Wait until every pod is there, and the master has every member."""

        def ok() -> bool:
            view = self.view()
            if self.phase != "Running" or view is None:
                return False
            up = [m for m in view.members if m.up and m.role != "master"]
            return len(up) == sum(view.members_wanted.values()) == len(self.pods()) - 1

        until(ok, self.story)

    def request_ends(self, plural: str, name: str) -> str:
        def status() -> Object:
            return (self.server.store.get(plural, NAMESPACE, name) or {}).get("status") or {}

        until(lambda: status().get("phase") in ("Succeeded", "Failed"), self.story)
        return str(status()["phase"])

    def story(self) -> str:
        """Return what a reader needs who looks for what went wrong."""
        return f"{self.job.get('status')}\n{self.story_of_pods()}"

    def story_of_pods(self) -> str:
        """Return the same of a job that may be gone."""
        logs = [self.folder / "operator.log", *sorted((self.folder / "cluster" / "logs").glob("*.log"))]
        ends = [f"--- {log.name}\n" + log.read_text(errors="replace")[-1500:] for log in logs if log.exists()]
        pods = [
            (name_of(p), p["status"].get("phase"), p["spec"].get("nodeName")) for p in self.server.store.all("pods")
        ]
        return f"{pods}\n" + "\n".join(ends)

    # ------------------------------------------------------------ the end

    def ended_well(self) -> None:
        self.hurry_file.touch()
        until(lambda: self.phase in ("Succeeded", "Failed"), self.story, timeout_s=400.0)
        assert self.phase == "Succeeded", self.story()
        report = audit(self.run_dir)
        assert report.ok, report.text() + self.story()

    def nothing_left(self) -> None:
        """Delete the job: everything of it goes."""
        of = self.server.of("elasticjobs")
        self.server.delete(of, NAMESPACE, self.name)
        kinds = ("pods", "services", "secrets", "persistentvolumeclaims", "poddisruptionbudgets")

        def left() -> list[str]:
            return [name_of(t) for kind in kinds for t in self.server.store.all(kind, NAMESPACE)]

        until(lambda: not left(), lambda: f"{left()} {self.story_of_pods()}")
        assert self.nodes._running == {}

    def close(self) -> None:
        self.kill_operator()
        self.cluster.close()
