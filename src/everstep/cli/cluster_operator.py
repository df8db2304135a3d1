"""Runs ``everstep operator``: on a cluster, or, with ``--demo``, on one that it plays itself."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from everstep.brain.events import CapacityChanged, ScaleAsked, SuspendAsked
from everstep.cli.link import ask_address
from everstep.cli.top import HEAD, headline, rows
from everstep.errors import ConfigError
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep
from everstep.model.job_view import JobView
from everstep.model.member import Address, Role
from everstep.net.auth import Secret, create_secret, load_secret
from everstep.net.messages import GetStatus, RequestType
from everstep.platforms.kubernetes.actions import MasterReport
from everstep.platforms.kubernetes.kinds import MASTER_PORT
from everstep.platforms.kubernetes.operator import Operator

ANSWER_S = 3.0
ASKERS = 8  # threads that wait for masters
DEMO_NODES = ("node-1", "node-2", "node-3")


class MastersByNetwork:
    """Talks to masters over the network of the pods."""

    def __init__(self) -> None:
        self._secrets: dict[str, Secret] = {}

    def __repr__(self) -> str:
        return f"<link to {len(self._secrets)} masters>"

    def report(self, host: str, secret: str) -> MasterReport:
        """Raise EverstepError: it does not answer."""
        view = self._ask(host, secret, GetStatus(True))
        assert isinstance(view, JobView)
        return report_of(view)

    def tell_size(self, host: str, secret: str, workers: int, ps: int) -> None:
        """Raise EverstepError: it does not answer. What it refuses is asked again by the next look."""
        counts = [(role, n) for role, n in ((Role.WORKER, workers), (Role.PS, ps)) if n]
        if counts:
            (role, count), *more = counts
            self._ask(host, secret, ScaleAsked(role, count, tuple(more)))

    def tell_gone(self, host: str, secret: str, pods: Sequence[str]) -> None:
        """Raise EverstepError: it does not answer."""
        for pod in pods:
            self._ask(host, secret, CapacityChanged(NodeId(pod), CapacityStep.TAKEN_BACK))

    def suspend(self, host: str, secret: str, suspensions: int) -> None:
        """Raise EverstepError: it does not answer."""
        self._ask(host, secret, SuspendAsked("spec.suspend", suspensions=suspensions))

    def fresh_secret(self) -> str:
        """Return the text of a new job's secret."""
        with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
            create_secret(Path(folder) / "secret")
            return (Path(folder) / "secret").read_text()

    def _ask(self, host: str, secret: str, request: RequestType) -> object:
        if secret not in self._secrets:
            self._secrets[secret] = read_secret(secret)
        address = Address(NodeId("node0"), "", host, MASTER_PORT)
        return ask_address(address, self._secrets[secret], request, ANSWER_S)


def read_secret(text: str) -> Secret:
    """Return a job's secret. Raises ConfigError: the text is none."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
        path = Path(folder) / "secret"
        path.touch(mode=0o600)
        path.write_text(text)
        return load_secret(path)


def report_of(view: JobView) -> MasterReport:
    """Return what counts to the operator of what a master shows."""
    checkpoint, total = view.checkpoint, sum(epoch.epochs * epoch.samples for epoch in view.epochs)
    done = sum(epoch.epoch * epoch.samples + epoch.samples_done for epoch in view.epochs)
    return MasterReport(
        workers=view.members_wanted.get("worker", 0),
        ps=view.members_wanted.get("ps", 0),
        members={str(node.node): node.workers + node.ps for node in view.nodes},
        samples=view.samples_done,
        waiting=view.supervision is not None and view.supervision.state == "waiting",
        suspensions=view.supervision.suspensions if view.supervision is not None else 0,
        over=view.exit_code is not None,
        step=view.group.step if view.group else 0,
        percent=100 * done // total if total else -1,
        membership=view.group.generation if view.group else view.placement.version if view.placement else 0,
        checkpoint=checkpoint.newest if checkpoint else 0,
        checkpoint_at=checkpoint.at if checkpoint else 0.0,
        headline=headline(view) if view.speed is not None else "",
        slowest=tuple({name: cell for name, cell in zip(HEAD, row, strict=True) if cell} for row in rows(view)),
    )


def run_operator(context: str, namespace: str, lease: bool) -> int:
    """Run the operator until it is told to stop; return the exit code."""
    from everstep.platforms.kubernetes.election import Election
    from everstep.platforms.kubernetes.lightkube_client import LightkubeClient

    client = LightkubeClient.connect(context)
    namespace = namespace or client.namespace
    election = Election(client, namespace, say) if lease else None
    leads = election.leads if election else lambda: True
    say(f"operator of namespace {namespace} at {client!r}")
    with stopping() as over, ThreadPoolExecutor(ASKERS, "ask") as askers:
        operator = Operator(client, namespace, MastersByNetwork(), say, leads, askers.submit)
        if election is not None:
            election.start()
        thread = threading.Thread(target=operator.run, name="operator", daemon=True)
        thread.start()
        over.wait()
        operator.close()
        thread.join(30)
        if election is not None:
            election.close()
    return 0


def run_demo(folder: Path, port: int, nodes: int) -> int:
    """Play a cluster here, with its operator, until it is told to stop; return the exit code."""
    from everstep.platforms.kubernetes.demo.played_cluster import DemoCluster

    names = tuple(f"node-{n}" for n in range(1, nodes + 1))
    with (
        stopping() as over,
        DemoCluster(folder, names, port) as cluster,
        ThreadPoolExecutor(ASKERS, "ask") as askers,
    ):
        operator = Operator(cluster.client(), "default", MastersByNetwork(), say, run=askers.submit)
        thread = threading.Thread(target=operator.run, name="operator", daemon=True)
        thread.start()
        say(f"a cluster of {nodes} nodes is played here: export KUBECONFIG={cluster.kubeconfig}")
        over.wait()
        operator.close()
        thread.join(30)
    return 0


def write_chart(folder: Path, image: str) -> None:
    """Write the operator's Helm chart. Raises ConfigError: something else is in the folder, or it cannot be written."""
    from everstep import __version__
    from everstep.platforms.kubernetes.chart import chart

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "Chart.yaml").is_file():
        raise ConfigError(f"--chart {folder}: has something else in it; name a new folder, or one with a chart")
    files = chart(image, __version__)
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise ConfigError(f"--chart {folder}: cannot be written: {error.strerror or error}") from None
    click.echo(f"{len(files)} files in {folder}; helm install everstep {folder} --namespace train --create-namespace")


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """Give an event that SIGTERM and Ctrl-C set."""
    over = threading.Event()
    old = {s: signal.signal(s, lambda *_: over.set()) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield over
    finally:
        for signo, handler in old.items():
            signal.signal(signo, handler)


def say(text: str) -> None:
    """Tell people a line."""
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}")
