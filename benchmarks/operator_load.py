"""The operator of Kubernetes under load: 200 jobs with 2,000 pods on the API server in memory.

``python -m benchmarks.operator_load [--quick]``. The operator is a process of its own; pods and masters are played.
Measured: from submitting all jobs until all run; how long one look at a job lasts; then, while nothing changes,
requests a minute for each job, and writes; memory. The server shares the machine, and is Python, too: what it costs
is in the time to start.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks._measure import say
from everstep.platforms.kubernetes.actions import MasterReport
from everstep.platforms.kubernetes.api_client import ChangeType
from everstep.platforms.kubernetes.kinds import API_VERSION, name_of

NAMESPACE = "default"
WORKERS, PS = 7, 2  # and a master: ten pods


class _PlayedMasters:
    def report(self, host: str, secret: str) -> MasterReport:
        return MasterReport(WORKERS, PS)

    def tell_size(self, host: str, secret: str, workers: int, ps: int) -> None:
        pass

    def suspend(self, host: str, secret: str) -> None:
        pass

    def fresh_secret(self) -> str:
        return "secret"


def operate(url: str, out: Path) -> None:
    """Run the operator until SIGTERM, then write how long its looks lasted."""
    from everstep.platforms.kubernetes.lightkube_client import LightkubeClient
    from everstep.platforms.kubernetes.operator import Operator

    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    operator = Operator(LightkubeClient.connect(url=url, token="any"), NAMESPACE, _PlayedMasters(), print)
    thread = threading.Thread(target=operator.run, daemon=True)
    thread.start()
    over.wait()
    operator.close()
    thread.join(30)
    out.write_text(json.dumps(operator.looks_s))


def run(quick: bool) -> dict[str, Any]:
    """Measure once."""
    import psutil

    from everstep.platforms.kubernetes.crds import definitions
    from everstep.platforms.kubernetes.demo.api_http import ApiHttp
    from everstep.platforms.kubernetes.demo.api_server import CRDS, ApiServer

    jobs, idle_s = (20, 15.0) if quick else (200, 60.0)
    server = ApiServer()
    for definition in definitions():
        server.create(server.of(CRDS), "", definition)
    http = ApiHttp(server)
    template = {"spec": {"containers": [{"name": "main", "image": "train:1"}]}}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "looks.json"
        argv = [sys.executable, "-m", "benchmarks.operator_load", http.url, str(out)]
        operator = subprocess.Popen(argv)
        try:
            began = time.monotonic()
            for n in range(jobs):
                spec = {"mode": "ParameterServer", "script": "train.py", "ps": {"replicas": PS, "template": template}}
                spec["worker"] = {"replicas": WORKERS, "template": template}
                meta = {"name": f"job-{n}"}
                body = {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": meta, "spec": spec}
                server.create(server.of("elasticjobs"), NAMESPACE, body)
            _until_all_run(server, jobs)
            start_s = time.monotonic() - began
            say(f"{jobs} jobs run after {start_s:.1f} s")
            time.sleep(20.0)  # what was asked for last settles
            writes, requests = server.store.writes, len(http.seen)
            time.sleep(idle_s)
            writes, requests = server.store.writes - writes, len(http.seen) - requests
            rss = psutil.Process(operator.pid).memory_info().rss
            operator.send_signal(signal.SIGTERM)
            operator.wait(60)
            looks = sorted(json.loads(out.read_text()))
        finally:
            operator.kill()
            operator.wait()
            http.close()
    p99_ms = 1000 * looks[int(0.99 * (len(looks) - 1))]
    a_minute = requests / jobs * 60.0 / idle_s
    say(f"{len(looks)} looks, p99 {p99_ms:.1f} ms; idle: {a_minute:.2f} requests a minute and job, {writes} writes")
    figures = {
        "jobs": jobs,
        "pods": jobs * (1 + PS + WORKERS),
        "start_s": start_s,
        "look.p50_ms": 1000 * looks[len(looks) // 2],
        "look.p99_ms": p99_ms,
        "idle.requests_a_minute": a_minute,
        "idle.writes": writes,
        "rss_mib": rss / (1 << 20),
    }
    return {
        "figures": figures,
        "aims": {"idle.requests_a_minute": "<= 2", "idle.writes": "== 0"},
        "holds": {"idle.requests_a_minute": a_minute <= 2, "idle.writes": writes == 0},
        "spread": {},
    }


def _until_all_run(server: Any, jobs: int) -> None:
    """Play the nodes until all jobs run."""
    began, version, asked = time.monotonic(), 0, 0.0
    while time.monotonic() < began + 600:
        entries, version = server.store.since("pods", version, 0.5)
        for pod in [entry.thing for entry in entries if entry.type is ChangeType.ADDED]:
            pod["spec"]["nodeName"] = "n1"
            conditions = [{"type": "Ready", "status": "True"}]
            pod["status"] = {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions}
            with server.store.lock:
                if server.store.get("pods", NAMESPACE, name_of(pod)) is not None:
                    server.store.put("pods", pod)
        if time.monotonic() > asked + 2.0:
            asked = time.monotonic()
            phases = [(job.get("status") or {}).get("phase") for job in server.store.all("elasticjobs")]
            if phases.count("Running") == jobs:
                return
    raise SystemExit(f"after 600 s not all of {jobs} jobs run")


if __name__ == "__main__":
    operate(sys.argv[1], Path(sys.argv[2]))
