"""Talks to Ray: each node of the job is an actor in a bundle of a placement group. Imported only by jobs on Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import socket
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Final

import msgspec

from everstep.errors import ConfigError, EverstepError, PlatformError, escaped
from everstep.ids import NodeId
from everstep.model.capacity import Market, Offer
from everstep.platforms.cluster_nodes import NodeState, SeenNode
from everstep.platforms.ray_agent import RayAgent
from everstep.platforms.ray_bundles import BundlePlace, Bundles

NAMESPACE: Final = "everstep"
LEAST: Final = (2, 50)
_REACH_S: Final = 5.0
_GONE_S: Final = 30.0
_LOOK_S: Final = 0.1
_STARTED_WITH: Final = re.compile(r"started with: Ray: (\S+) Python: (\S+)")
"""Finds the versions of the cluster, then those of this process, in the words with which Ray refuses them."""


class RayNode(msgspec.Struct):
    """Is what is known of the actor of a node. ``where``, ``ended``: answers that are waited for."""

    actor: Any
    where: Any
    ended: Any
    machine: str = ""
    over: SeenNode | None = None


def version_of(text: str) -> tuple[int, ...]:
    """Return the first numbers of a version: ``2.52.0`` is (2, 52, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def installed_version() -> str:
    """Return the version of Ray that is installed here; "": none."""
    if importlib.util.find_spec("ray") is None:
        return ""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""


def check_ray(version: str) -> None:
    """Raise ConfigError unless this version of Ray can be used. ``version``: "": it is not installed."""
    least = ".".join(map(str, LEAST))
    if not version:
        raise ConfigError("--on ray: Ray is not installed here: pip install 'everstep[ray]'")
    if version_of(version) < LEAST:
        raise ConfigError(f"--on ray: Ray {version} is too old: {least} or newer (pip install 'everstep[ray]')")


def mismatch_words(text: str) -> str:
    """Return what to tell of Ray's own words, one line, that the cluster and this process are of different versions."""
    found = _STARTED_WITH.findall(text)
    if len(found) != 2:
        return f"the cluster is of another Ray or Python: {escaped(text, 300)}"
    (ray, python), (own_ray, own_python) = ((escaped(a, 40), escaped(b, 40)) for a, b in found)
    if version_of(ray) < LEAST:
        advice = f"give the cluster Ray {'.'.join(map(str, LEAST))} or newer"
    elif ray == own_ray:
        advice = f"run everstep with Python {python}, as the cluster does"
    elif python == own_python:
        advice = f"pip install 'ray=={ray}'"
    else:
        advice = f"run everstep with Python {python} and Ray {ray}, as the cluster does"
    return f"the cluster has Ray {ray} on Python {python}, here is Ray {own_ray} on Python {own_python}: {advice}"


def connect_ray(address: str) -> None:
    """Connect this process to a cluster, once. ``address``: HOST:PORT; "": the one of this machine, or of
    ``RAY_ADDRESS``. Raise ConfigError: it is another version or Python; PlatformError: there is none."""
    check_ray(installed_version())
    import ray

    if ray.is_initialized():
        return
    if address and not address.startswith(("ray://", "local")):
        _reach(address)
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            ignore_reinit_error=True,
        )
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        if "ersion mismatch" in text:
            raise ConfigError(f"--on ray: {mismatch_words(text)}") from None
        where = address or "on this machine"
        raise PlatformError(f"--on ray: no cluster answers {where}: {escaped(text, 300)}") from None


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--on ray:{address}: expected ray:HOST:PORT, or ray for the cluster of this machine")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise PlatformError(f"--on ray: nothing answers at {address}: {error}") from None


class RayCluster:
    """Is the port to Ray for the nodes of one job. ``group``: the name that its actors and placement groups begin with.
    ``words``: of the agent of a node."""

    every_s = 0.5

    def __init__(
        self,
        group: str,
        cpus: int,
        gpus: int,
        words: Callable[[NodeId], list[str]],
        secret: Callable[[], bytes],
        say: Callable[[str], None],
    ) -> None:
        self.name = "ray"
        self._group, self._words, self._secret, self._say = group, words, secret, say
        self._resources = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
        self._bundles = Bundles()
        self._nodes: dict[NodeId, RayNode] = {}
        self._groups: dict[int, Any] = {}
        self._drains_hidden = False
        self._wished = 0  # nodes for which Ray's autoscaler was asked; -1: an earlier everstep run may have asked
        self._adopt()
        if self._nodes:
            self._wished = -1

    def __repr__(self) -> str:
        return f"<{self._bundles!r} of {self._group}>"

    def offers(self) -> tuple[Offer, ...]:
        import ray

        with _ray_errors("resources"):
            alive = [node for node in ray.nodes() if node["Alive"]]
            free = _free_resources()
        count = sum(
            all(free.get(node["NodeID"], node["Resources"]).get(k, 0.0) >= v for k, v in self._resources.items())
            for node in alive
        )
        return (Offer("", "", Market.ON_DEMAND, None, count),) if count else ()

    def look(self) -> tuple[SeenNode, ...]:
        import ray

        with _ray_errors("nodes"):
            waits = [n.ended for n in self._nodes.values() if n.over is None]
            waits += [n.where for n in self._nodes.values() if not n.machine and n.over is None]
            ready = set(ray.wait(waits, num_returns=len(waits), timeout=0)[0]) if waits else set()
            leaving = self._draining()
            seen = {name: self._see(name, node, ready, leaving) for name, node in self._nodes.items()}
            waiting = [name for name, one in seen.items() if one.state is NodeState.ASKED]
            for name in self._bundles.misplaced(waiting, self._placed_now()) if waiting else ():
                why = "its bundle is on no machine, and another one is free"
                seen[name] = self._nodes[name].over = SeenNode(name, NodeState.ENDED, seen[name].offer, why=why)
        return tuple(seen.values())

    def _see(self, name: NodeId, node: RayNode, ready: set[Any], leaving: dict[str, float | None]) -> SeenNode:
        import ray

        offer = Offer("", "", Market.ON_DEMAND)
        if node.over is not None:
            return node.over
        if node.where in ready:
            with contextlib.suppress(Exception):  # (it has ended: the other answer says so)
                node.machine = ray.get(node.where)[0]
        if node.ended in ready:
            try:
                status, why = ray.get(node.ended)
                node.over = SeenNode(name, NodeState.ENDED, offer, None, bool(status), not status, why)
            except Exception as error:  # its actor or its machine is gone
                why = escaped(str(error).splitlines()[0] if str(error) else type(error).__name__, 200)
                node.over = SeenNode(name, NodeState.ENDED, offer, why=why)
            return node.over
        if not node.machine:
            return SeenNode(name, NodeState.ASKED, offer)
        if node.machine in leaving:
            return SeenNode(name, NodeState.LEAVING, offer, leaving[node.machine], why="its Ray node is drained")
        return SeenNode(name, NodeState.RUNNING, offer)

    def _draining(self) -> dict[str, float | None]:
        """Return the Ray nodes that are drained, with the seconds that are left; None: no end is known."""
        if self._drains_hidden:
            return {}
        try:
            from ray._private.state import state

            found = state.get_draining_nodes()
        except (ImportError, AttributeError):
            self._drains_hidden = True  # (Ray has no public way to ask)
            self._say("capacity: ray: this version does not tell which nodes are drained: they go without a word")
            return {}
        return {n: max(0.0, at / 1000 - time.time()) if at else None for n, at in found.items()}

    def add(self, nodes: Sequence[NodeId]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with _ray_errors("request"):
            lacks = sum(offer.count for offer in self.offers()) < len(nodes)
            placed, made = self._bundles.assign(nodes, self._placed_now())
            if made is not None:
                number, size = made
                alive = sum(bool(node["Alive"]) for node in ray.nodes())
                self._groups[number] = placement_group(
                    [dict(self._resources) for _ in range(size)],
                    strategy="STRICT_SPREAD" if size <= alive else "SPREAD",
                    name=f"{self._group}.{number}",
                    lifetime="detached",
                )
            for node, place in placed:
                strategy = PlacementGroupSchedulingStrategy(self._groups[place.group], place.bundle)
                group = f"{self._group}.{place.group}"
                actor = (
                    ray.remote(RayAgent)
                    .options(
                        name=f"{group}.{place.bundle}.{node}",
                        namespace=NAMESPACE,
                        lifetime="detached",
                        max_restarts=0,
                        max_concurrency=4,
                        num_cpus=self._resources["CPU"],
                        num_gpus=self._resources.get("GPU", 0.0),
                        scheduling_strategy=strategy,
                    )
                    .remote(self._words(node), self._secret(), node, group)
                )
                self._hold(node, actor)
            if lacks or self._wished:
                self._wish()

    def _wish(self) -> None:
        """Ask Ray's autoscaler for machines for all nodes that are held or waited for; for none: withdraw the request.
        A cluster has one such request: that of the job that asked last."""
        from ray.autoscaler.sdk import request_resources

        if self._wished == len(self._nodes):
            return
        bundle = {name: int(count) for name, count in self._resources.items()}
        request_resources(bundles=[dict(bundle) for _ in self._nodes])
        self._wished = len(self._nodes)
        self._say(f"capacity: ray: its autoscaler is asked for machines for {self._wished} nodes")

    def _placed_now(self) -> set[BundlePlace]:
        """Return the bundles of this job that are on a machine that lives and stays."""
        import ray
        from ray.util.placement_group import placement_group_table

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - self._draining().keys()
        found = set()
        for entry in placement_group_table().values():
            name, _, number = str(entry["name"]).rpartition(".")
            if name == self._group and number.isdigit() and entry["state"] != "REMOVED":
                on = entry["bundles_to_node_id"].items()
                found |= {BundlePlace(int(number), int(bundle)) for bundle, machine in on if machine in alive}
        return found

    def _hold(self, node: NodeId, actor: Any) -> None:
        self._nodes[node] = RayNode(actor, actor.where.remote(), actor.ended.remote())

    def cancel(self, node: NodeId) -> None:
        import ray

        held = self._nodes.pop(node, None)
        with contextlib.suppress(Exception):  # (its actor is gone)
            if held is not None:
                ray.kill(held.actor, no_restart=True)
        for number in self._bundles.free([node]):
            self._remove(number)
        with contextlib.suppress(Exception):  # (the next change, or the end, says it again)
            if self._wished:
                self._wish()

    def _remove(self, number: int) -> None:
        from ray.util.placement_group import remove_placement_group

        group = self._groups.pop(number, None)
        with contextlib.suppress(Exception):
            if group is not None:
                remove_placement_group(group)

    def _adopt(self) -> None:
        """Find what an ``everstep run`` that was killed has left."""
        import ray
        from ray.util.placement_group import get_placement_group, placement_group_table

        with _ray_errors("adoption"):
            for entry in placement_group_table().values():
                name, _, number = str(entry["name"]).rpartition(".")
                if name != self._group or not number.isdigit() or entry["state"] == "REMOVED":
                    continue
                self._groups[int(number)] = get_placement_group(entry["name"])
                self._bundles.adopt(int(number), len(entry["bundles"]))
            for full in _actors(self._group):
                head, _, rest = full.removeprefix(f"{self._group}.").partition(".")
                bundle, _, node = rest.partition(".")
                if not head.isdigit() or int(head) not in self._groups:
                    continue
                self._bundles.take(BundlePlace(int(head), int(bundle)), NodeId(node))
                self._hold(NodeId(node), ray.get_actor(full, NAMESPACE))

    def close(self) -> None:
        """Kill the actors, remove the placement groups, and wait until the cluster shows none of them."""
        from ray.util.placement_group import placement_group_table

        with _ray_errors("end"):
            for node in list(self._nodes):
                self.cancel(node)
            for number in list(self._groups):
                self._remove(number)
            if self._wished:
                self._wish()
            end = time.monotonic() + _GONE_S
            while time.monotonic() < end:
                groups = [e for e in placement_group_table().values() if e["state"] != "REMOVED"]
                left = [e["name"] for e in groups if str(e["name"]).startswith(f"{self._group}.")]
                if not left and not _actors(self._group):
                    break
                time.sleep(_LOOK_S)


def _actors(group: str) -> list[str]:
    """Return the names of the actors of a job. The process may have connected to another namespace by itself."""
    from ray.util import list_named_actors

    found = list_named_actors(all_namespaces=True)
    return [a["name"] for a in found if a["namespace"] == NAMESPACE and a["name"].startswith(f"{group}.")]


def _free_resources() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


@contextlib.contextmanager
def _ray_errors(what: str) -> Any:
    """Make one line of whatever Ray raises."""
    try:
        yield
    except EverstepError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise PlatformError(f"ray: {what}: {escaped(text, 300)}") from None


def cpus_of(workers: int, ps: int) -> int:
    """Return how many CPUs a node with so many members asks for, where nobody said."""
    return max(1, math.ceil(workers + ps))
