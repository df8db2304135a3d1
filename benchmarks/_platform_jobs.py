"""The same small job on every platform of this machine: it is begun, a node of it is lost, and it is ended.

Two nodes with a worker and a ps each, parity 1+1, and a master that is on neither. Each worker writes the time of each
step to a file of its own; all platforms share this machine's file system.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from benchmarks._jobs import SPARSE_HEAD, is_safe
from benchmarks._measure import ROOT, Child, everstep, say
from everstep.agent.rundir import in_use
from everstep.cli.link import ask_view
from everstep.errors import EverstepError
from everstep.model.job_view import JobView
from everstep.net.rendezvous import SECRET_FILE, master_address

CLUSTERS = ROOT / "tests" / "platforms"
"""Where the Ray and the Slurm of this machine are, which the tests use, too."""
SIZE = ["--workers", "2", "--ps", "2", "--parity", "1+1"]
NODES = 2
LIMIT_S = 240.0
LOOK_S = 0.02
SCRIPT = (
    SPARSE_HEAD
    + """steps = open(os.path.join({steps!r}, f"{{time.time_ns()}}-{{os.getpid()}}"), "w", buffering=1)
for batch in job.steps(job.loader(data, batch_size=20, epochs=200)):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad(); loss.backward(); opt.step()
    steps.write(f"{{time.time()}}\\n")
    time.sleep(0.05)
"""
)


class PlatformJob:
    """One job in ``home``: its script, its run directory, and what is seen of it. ``words``: the end of its log."""

    def __init__(self, home: Path, run_dir: Path, words: Callable[[], str]) -> None:
        self.home, self.run_dir, self._words = home, run_dir, words
        self.main: Child | None = None  # without which nothing more will happen
        self._steps, self.script = home / "steps", home / "train.py"
        self._steps.mkdir(parents=True)
        self.script.write_text(SCRIPT.format(steps=str(self._steps)))

    def view(self) -> JobView | None:
        if not in_use(self.run_dir):
            return None
        with contextlib.suppress(EverstepError, OSError):
            return ask_view(self.run_dir, timeout_s=2.0)
        return None

    def wait_for(self, what: Callable[[], object], why: str) -> None:
        """RuntimeError if it does not happen in time."""
        end = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > end or (self.main is not None and self.main.process.poll() is not None):
                raise RuntimeError(f"{why}: not within {LIMIT_S:g} s; the last words:\n{self._words()}")
            time.sleep(LOOK_S)

    def steps(self) -> dict[str, list[float]]:
        """When each worker ended its steps, by its file's name: seconds since 1970."""
        lines = {path.name: path.read_text().split("\n")[:-1] for path in self._steps.iterdir()}
        return {name: [float(line) for line in found] for name, found in lines.items()}

    def trains(self) -> bool:
        """Whether both workers have trained for a while and every partition has its mirror."""
        if sum(len(times) >= 20 for times in self.steps().values()) < NODES:
            return False
        view = self.view()
        return view is not None and is_safe(view)


class Platform(Protocol):
    """Is where jobs run. One job at a time."""

    def begin(self, home: Path) -> PlatformJob:
        """Begin a job on two nodes."""
        ...

    def lose_node(self, job: PlatformJob) -> float:
        """Lose one of its nodes without a word, while a spare machine is there; return when."""
        ...

    def end(self) -> None:
        """End the job. Nothing of it stays."""
        ...


def _tail(*logs: Path) -> str:
    ends = [f"--- {log.name}\n" + log.read_text(errors="replace")[-1500:] for log in logs if log.exists()]
    return "\n".join(ends)


def _machine_of(job: PlatformJob, at: int) -> str:
    view = job.view()
    assert view is not None
    return sorted(n.machine for n in view.nodes if n.alive and n.node != "node0")[at]


# ------------------------------------------------------------ this machine


class AgentsHere:
    """Agents of this machine. A lost one is replaced at once: a supervisor that learns of each loss in no time."""

    def __init__(self) -> None:
        self._main: Child | None = None
        self._agents: list[Child] = []
        self._names = itertools.count()
        self._join: Callable[[], None] = lambda: None

    def begin(self, home: Path) -> PlatformJob:
        log = home / "run.log"
        job = PlatformJob(home, home / "run", lambda: _tail(log, *sorted(home.glob("agent*.log"))))
        settings = home / "job.yaml"
        settings.write_text(f"master_alone: true\nnodes: {NODES + 1}\n")
        words = ["run", "--no-display", "-c", settings, "--bind", "127.0.0.1:0", *SIZE, "--run-dir", job.run_dir]
        self._main = job.main = Child(everstep(*words, job.script), None, log)
        job.wait_for(lambda: (at := master_address(job.run_dir)) is not None and at.port, "no master")
        at = master_address(job.run_dir)
        assert at is not None

        def join() -> None:
            name = f"agent{next(self._names)}"
            words = ["agent", "--join", f"127.0.0.1:{at.port}", "--secret-file", job.run_dir / SECRET_FILE]
            words += ["--workers", "1", "--ps", "1", "--node", name, "--machine", f"m-{name}"]
            self._agents.append(Child(everstep(*words, "--run-dir", home / name), None, home / f"{name}.log"))

        self._join = join
        for _ in range(NODES):
            join()
        return job

    def lose_node(self, job: PlatformJob) -> float:
        lost = self._agents.pop(0)
        at = time.time()
        lost.kill()
        self._join()
        return at

    def end(self) -> None:
        for child in [*self._agents, *([self._main] if self._main else [])]:
            child.kill()
        self._agents, self._main = [], None


# ------------------------------------------------------------ Kubernetes


class KubernetesHere:
    """The API server in memory with its nodes, and the operator as a process of its own."""

    def __init__(self, folder: Path) -> None:
        from everstep.platforms.kubernetes.demo.played_cluster import DemoCluster

        self._cluster = DemoCluster(folder, ("head",))
        self._numbers = itertools.count()
        self._nodes: list[str] = []
        self._name = ""
        self._cluster.server.merge(
            self._cluster.server.of("nodes"), "", "head", {"metadata": {"labels": {"for": "it"}}}
        )
        env = {"KUBECONFIG": str(self._cluster.kubeconfig)}
        self._log = folder / "operator.log"
        self._operator = Child(everstep("operator", "--no-lease"), env, self._log)

    def _more(self) -> None:
        self._nodes.append(f"node-{next(self._numbers)}")
        self._cluster.runner.add_node(self._nodes[-1], {"for": "members"})

    def begin(self, home: Path) -> PlatformJob:
        from everstep.platforms.kubernetes.demo.played_cluster import NAMESPACE
        from everstep.platforms.kubernetes.kinds import API_VERSION

        self._name = f"job-{next(self._numbers)}"
        claim = self._cluster.folder / "claims" / NAMESPACE / f"{self._name}-master" / "job"
        logs = self._cluster.folder / "logs"
        job = PlatformJob(home, claim, lambda: _tail(self._log, *sorted(logs.glob(f"*{self._name}-*.log"))))
        while len(self._nodes) < NODES:
            self._more()

        def template(label: str) -> dict[str, Any]:
            containers = [{"name": "main", "image": "everstep:benchmark"}]
            return {"spec": {"containers": containers, "nodeSelector": {"for": label}}}

        spec = {
            "mode": "ParameterServer",
            "script": str(job.script),
            "master": {"template": template("it")},
            "worker": {"replicas": 2, "minReplicas": 1, "template": template("members")},
            "ps": {"replicas": 2, "minReplicas": 1, "template": template("members")},
            "psProtection": {"strategy": "Backup"},
        }
        body = {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": {"name": self._name}, "spec": spec}
        self._cluster.server.create(self._cluster.server.of("elasticjobs"), NAMESPACE, body)
        return job

    def lose_node(self, job: PlatformJob) -> float:
        self._more()  # (the spare machine; it was not there before, so that each of the others has two pods)
        at = time.time()
        self._cluster.runner.kill_node(self._nodes.pop(0))
        return at

    def end(self) -> None:
        from everstep.platforms.kubernetes.demo.played_cluster import NAMESPACE
        from everstep.platforms.kubernetes.demo.refusals import RefusedRequest

        server, end = self._cluster.server, time.monotonic() + LIMIT_S
        with contextlib.suppress(RefusedRequest):
            server.delete(server.of("elasticjobs"), NAMESPACE, self._name)
        for pod in server.store.all("pods", NAMESPACE):
            with contextlib.suppress(RefusedRequest):
                server.delete(server.of("pods"), NAMESPACE, pod["metadata"]["name"], "", 0)
        while server.store.all("pods", NAMESPACE) and time.monotonic() < end:
            time.sleep(LOOK_S)

    def close(self) -> None:
        self._operator.kill()
        self._cluster.close()


# ------------------------------------------------------------ Ray and Slurm


class _RunOn:
    """A job of ``everstep run --on``."""

    def __init__(self, on: list[str], env: Mapping[str, str]) -> None:
        self._on, self._env = on, env
        self._main: Child | None = None

    def begin(self, home: Path) -> PlatformJob:
        log = home / "run.log"
        job = PlatformJob(home, home / "run", lambda: _tail(log, *sorted(home.glob("run/nodes/*.log"))))
        words = ["run", "--no-display", *self._on, "--nodes", str(NODES), *SIZE, "--run-dir", job.run_dir]
        self._main = job.main = Child(everstep(*words, job.script), self._env, log)
        return job

    def end(self) -> None:
        if self._main is not None:
            self._main.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._main.process.wait(60)
            self._main.kill()
            self._main = None


class RayJobs(_RunOn):
    """A real Ray of three machines: two for the job and a spare one."""

    def __init__(self) -> None:
        from ray_here import RayHere

        self._ray = RayHere(NODES + 1)
        super().__init__(["--on", f"ray:{self._ray.address}"], {})

    def begin(self, home: Path) -> PlatformJob:
        while len(self._ray.nodes) < NODES + 1:
            self._ray.add()
        return super().begin(home)

    def lose_node(self, job: PlatformJob) -> float:
        machine = _machine_of(job, 0)
        at = time.time()
        self._ray.kill_node(machine)
        return at

    def close(self) -> None:
        self._ray.close()


class SlurmJobs(_RunOn):
    """A real Slurm of three machines: two for the job and a spare one."""

    def __init__(self) -> None:
        from slurm_here import SlurmHere

        self._slurm = SlurmHere(NODES + 1)
        self._down: list[str] = []
        super().__init__(["--on", "slurm", "--partition", "spot"], self._slurm.env)

    def begin(self, home: Path) -> PlatformJob:
        for node in self._down:
            self._slurm.start_node(node)
            self._slurm.said("scontrol", "update", f"nodename={node}", "state=RESUME")
        self._down = []
        return super().begin(home)

    def lose_node(self, job: PlatformJob) -> float:
        running = [line.split() for line in self._slurm.jobs() if " RUNNING " in line]
        node = sorted(words[3] for words in running)[0]
        self._down.append(node)
        at = time.time()
        self._slurm.kill_node(node)
        return at

    def close(self) -> None:
        self._slurm.close()


# ------------------------------------------------------------ which there are


def _ray_is_missing() -> str:
    return "" if importlib.util.find_spec("ray") else "Ray is not installed (pip install 'everstep[ray]')"


def _slurm_is_missing() -> str:
    from slurm_here import missing

    return str(missing())


def _kubernetes_is_missing() -> str:
    lacking = [name for name in ("lightkube", "cel") if not importlib.util.find_spec(name)]
    return f"{', '.join(lacking)} not installed (pip install 'everstep[k8s-demo]')" if lacking else ""


@contextlib.contextmanager
def platforms(names: list[str], folder: Path) -> Iterator[dict[str, Platform]]:
    """Give the platforms of these names that are installed here, by name. The others are said in a line each."""
    if str(CLUSTERS) not in sys.path:
        sys.path.insert(0, str(CLUSTERS))
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    made: dict[str, tuple[Callable[[], str], Callable[[], Any]]] = {
        "here": (lambda: "", AgentsHere),
        "kubernetes": (_kubernetes_is_missing, lambda: KubernetesHere(folder / "kubernetes")),
        "ray": (_ray_is_missing, RayJobs),
        "slurm": (_slurm_is_missing, SlurmJobs),
    }
    with contextlib.ExitStack() as stack:
        found: dict[str, Platform] = {}
        for name in names:
            missing, make = made[name]
            why = missing()
            if why:
                say(f"{name}: skipped: {why}")
                continue
            found[name] = make()
            stack.callback(getattr(found[name], "close", found[name].end))
        yield found
