"""Runs the machines of ``everstep run --capacity``: the source, the agents, and the journal's word of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from everstep.brain.events import CapacityChanged, DrainAsked
from everstep.cli.cluster_platform import make_cluster
from everstep.cli.link import ask_master
from everstep.config.capacity import CLUSTERS, parse_capacity
from everstep.config.spec import JobSpec
from everstep.ids import NodeId
from everstep.model.job_view import JobView
from everstep.net.rendezvous import SECRET_FILE, master_address
from everstep.platforms.agents import AgentsElsewhere, LocalAgents
from everstep.platforms.capacity import AgentPlatform, Capacity
from everstep.platforms.cluster_capacity import ClusterAgents, ClusterMemory
from everstep.platforms.command_capacity import CommandCapacity
from everstep.platforms.fleet import Remember
from everstep.platforms.fleet_runner import FleetRunner, StandIns
from everstep.platforms.notices import DESIGN_LEAD_S
from everstep.platforms.trace_capacity import TraceCapacity
from everstep.policies.cluster_size import nodes_wanted
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.waits import fallback_s
from everstep.units import seconds

REMEMBER_S = 60.0
"""A master that restarts is waited for so long."""


def make_fleet(
    spec: JobSpec,
    run_dir: Path,
    host: str,
    fetch: Callable[[], JobView | None],
    say: Callable[[str], None],
) -> FleetRunner | None:
    """Return what has machines come and go for this job; None: nothing does. ``host``: of the master, as other nodes
    reach it. Raise ConfigError or PlatformError."""
    kind, rest = parse_capacity(spec.capacity)
    if not kind:
        return None
    port = spec.bind.rpartition(":")[2]
    join = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def at() -> str:
        address = master_address(run_dir)
        port = address.port if address is not None else 0
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def drain(node: NodeId, in_s: float | None) -> None:
        ask_master(run_dir, DrainAsked(node, DESIGN_LEAD_S if in_s is None else max(1.0, in_s)))

    def remember(fact: Remember) -> None:
        offer = fact.grant.offer
        of = (offer.hardware, offer.zone, offer.market, offer.price)
        change = CapacityChanged(fact.grant.node, fact.step, *of, fact.recorded_s, fact.life)
        ask_master(run_dir, change, REMEMBER_S)

    source: Capacity
    agents: AgentPlatform
    if kind == "trace":
        quiet_s, lead_s = seconds(spec.capacity_quiet), seconds(spec.capacity_lead)
        source = TraceCapacity(Path(rest), spec.capacity_speed, quiet_s, lead_s)
        agents = LocalAgents(run_dir, at, spec.capacity_workers, spec.capacity_ps)
        most = spec.capacity_nodes or source.most
    elif kind in CLUSTERS:
        cluster, memory = make_cluster(spec, run_dir, join, say)
        return FleetRunner(
            cluster,
            ClusterAgents(cluster, drain),
            spec.capacity_nodes,
            lambda: fetch() is not None,
            lambda fact: remember_once(fact, memory, remember),
            say,
            lambda: cluster_wants(spec, fetch(), cluster.going()),
        )
    else:
        source = CommandCapacity(rest, {"EVERSTEP_JOIN": join, "EVERSTEP_SECRET_FILE": str(run_dir / SECRET_FILE)})
        agents = AgentsElsewhere(drain)
        most = spec.capacity_nodes
    wants = (lambda: stand_ins(fetch())) if fallback_s(spec) else None
    return FleetRunner(source, agents, most, lambda: fetch() is not None, remember, say, wants)


def remember_once(fact: Remember, memory: ClusterMemory, remember: Callable[[Remember], None]) -> None:
    """Have the journal say what became of a node, unless an earlier ``everstep run`` had it say so. Raise what
    ``remember`` raises, PlatformError."""
    node, offer = fact.grant.node, fact.grant.offer
    if not memory.has(node, fact.step):
        remember(fact)
        memory.recorded(node, fact.step, offer)


def cluster_wants(spec: JobSpec, view: JobView | None, going: Mapping[NodeId, float | None]) -> StandIns | None:
    """Return what the job wants of its cluster, of which ``going`` nodes go; None: its master does not answer, or has
    not begun."""
    if view is None or not view.members:
        return None
    wanted = nodes_wanted(spec, view, going)
    return StandIns(0, wanted.emptied, wanted.machines, wanted.empty)


def stand_ins(view: JobView | None) -> StandIns | None:
    """Return what the job wants in place of spot machines; None: its master does not answer."""
    if view is None or view.supervision is None:
        return None
    count = view.supervision.on_demand
    empty = (n.node for n in view.nodes if n.draining and n.alive and not n.workers and not n.ps and not n.spot)
    return StandIns(count, tuple(node for node in empty if not count and node != HOME_NODE))
