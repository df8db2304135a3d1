"""Runs a job on nodes of Ray or Slurm (``everstep run --on``): the settings that follow, its machines, its next life.

The master stays with ``everstep run``; each node of the cluster has an agent. An ``everstep run`` that was killed, or
queued again by Slurm, is started with the same words: it goes on from the journal in its run directory.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from everstep.agent.rundir import remove_sockets
from everstep.brain.events import CapacityChanged
from everstep.cli.display import read_summary
from everstep.cli.replay import JOURNAL_FILE
from everstep.cli.suspend import go_on
from everstep.config.capacity import CLUSTERS, parse_capacity
from everstep.config.load import read_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError, PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import CapacityStep, Offer
from everstep.net.rendezvous import SECRET_FILE
from everstep.platforms.cluster_capacity import (
    LEAD_S,
    STATE_FILE,
    ClusterCapacity,
    ClusterMemory,
    ClusterPort,
    ClusterState,
    new_state,
    read_state,
)
from everstep.platforms.cluster_nodes import ClusterNodes, node_number
from everstep.platforms.slurm_jobs import SlurmSettings
from everstep.policies.cluster_size import places
from everstep.storage.journal import read_journal

RESTARTS: Final = "SLURM_RESTART_COUNT"
"""Of the environment: how often Slurm has queued this job again."""


def run_on(on: str, script: str, *args: str, **settings: Any) -> int:
    """Train a script on nodes of a cluster: ``run_on("ray", "train.py", nodes=3, workers=3)`` is ``everstep run --on
    ray --nodes 3 --workers 3 train.py``. Return its exit code. Call it in the main thread.

    ``settings``: those of a job.yaml. Raises EverstepError: they are refused, or the cluster is."""
    from everstep.cli.run import run_job

    return run_job(None, {**settings, "capacity": on, "script": script, "args": tuple(args)}, live=False)


def of_cluster(spec: JobSpec) -> bool:
    """Return whether the machines of a job come from a cluster."""
    return parse_capacity(spec.capacity).kind in CLUSTERS


def on_cluster(spec: JobSpec) -> JobSpec:
    """Return the spec of a job on a cluster that can be reached: the master here, ``nodes`` nodes there. Raise
    ConfigError, PlatformError."""
    count = spec.nodes
    if count > spec.workers + spec.ps:
        raise ConfigError(
            f"nodes = {count}: more than there are workers and ps ({spec.workers} + {spec.ps}): a node would be empty"
        )
    spec = msgspec.structs.replace(
        spec,
        bind=spec.bind or "0.0.0.0:0",
        master_alone=True,
        nodes=count + 1,
        capacity_nodes=count,
        capacity_workers=places(spec.workers, count),
        capacity_ps=places(spec.ps, count),
    )
    kind, rest = parse_capacity(spec.capacity)
    if kind == "ray":
        from everstep.platforms.ray_cluster import connect_ray

        connect_ray(rest)
    else:
        from everstep.platforms.slurm_cluster import check_slurm

        if spec.slurm_steps:
            from everstep.platforms.slurm_steps import allocation_of

            allocation_of(os.environ, count)
        else:
            check_slurm(slurm_settings(spec))
    return spec


def slurm_settings(spec: JobSpec) -> SlurmSettings:
    """Return what each node asks Slurm for."""
    cpus = spec.node_cpus or spec.capacity_workers + spec.capacity_ps
    of = spec.slurm_partition, spec.slurm_account, spec.slurm_time, spec.slurm_options
    return SlurmSettings(*of, cpus, spec.node_gpus)


def make_cluster(
    spec: JobSpec, run_dir: Path, at: str, say: Callable[[str], None]
) -> tuple[ClusterCapacity, ClusterMemory]:
    """Return the machines of a job, and what is remembered of them. ``at``: HOST:PORT of its master. What an earlier
    ``everstep run`` left is taken over; if its master was elsewhere, it is given back. Raise PlatformError."""
    state = read_state(run_dir)
    if state is not None and state.at != at:
        with contextlib.suppress(PlatformError):
            make_port(spec, run_dir, state.group, at, say).close()
        state = new_state(spec.name, at, state)
    if state is not None:
        state.held = held_by_journal(run_dir, state)
    kept = state or new_state(spec.name, at)
    memory = ClusterMemory(run_dir, kept)
    nodes = ClusterNodes(parse_capacity(spec.capacity).kind, LEAD_S, kept.number, kept.held)
    port = make_port(spec, run_dir, kept.group, at, say)
    return ClusterCapacity(port, nodes, memory.keep, say, forget=memory.forget), memory


def held_by_journal(run_dir: Path, state: ClusterState) -> dict[NodeId, Offer]:
    """Return the nodes that the journal has as held. An ``everstep run`` may have been killed before it noted them in
    ``state``, which counts where there is no journal."""
    held: dict[NodeId, Offer] = {}
    try:
        for _, event, _ in read_journal(run_dir / JOURNAL_FILE):
            match event.fact:
                case CapacityChanged(node, CapacityStep.GRANTED, hardware, zone, market, price):
                    held[node] = Offer(hardware, zone, market, price)
                case CapacityChanged(node, CapacityStep.TAKEN_BACK | CapacityStep.GIVEN_BACK):
                    held.pop(node, None)
                case _:
                    pass
    except EverstepError:
        return state.held
    return {node: offer for node, offer in held.items() if node_number(node) > state.forgot}


def make_port(spec: JobSpec, run_dir: Path, group: str, at: str, say: Callable[[str], None]) -> ClusterPort:
    """Return the port to the cluster, for the nodes of ``group``. Raise ConfigError, PlatformError."""
    kind, rest = parse_capacity(spec.capacity)
    if kind == "slurm":
        from everstep.platforms.slurm_cluster import SlurmCluster, check_slurm, own_partition, slurm_agent

        settings = slurm_settings(spec)
        if spec.slurm_steps:
            from everstep.platforms.slurm_steps import SlurmSteps, allocation_of

            job = allocation_of(os.environ, spec.capacity_nodes)
            partition = own_partition(os.environ)
            agent = slurm_agent(sys.executable, at, run_dir, spec.capacity_workers, spec.capacity_ps, partition)
            return SlurmSteps(job, settings, agent)
        partition = check_slurm(settings)
        agent = slurm_agent(sys.executable, at, run_dir, spec.capacity_workers, spec.capacity_ps, partition)
        return SlurmCluster(group, settings, agent, partition)
    from everstep.platforms.ray_cluster import RayCluster, connect_ray

    connect_ray(rest)

    def words(node: NodeId) -> list[str]:
        places = ["--workers", str(spec.capacity_workers), "--ps", str(spec.capacity_ps)]
        return ["--join", at, "--node", node, *places]

    def secret() -> bytes:
        return (run_dir / SECRET_FILE).read_bytes()

    cpus = spec.node_cpus or spec.capacity_workers + spec.capacity_ps
    return RayCluster(group, cpus, spec.node_gpus, words, secret, say)


# ------------------------------------------------------------ the next life


def has_begun(run_dir: Path) -> bool:
    """Return whether a job of a cluster is in this run directory, and has not ended."""
    if not (run_dir / "job.json").exists() or not (run_dir / STATE_FILE).exists():
        return False
    summary = read_summary(run_dir)
    return summary is None or summary.is_suspended


def run_again(spec: JobSpec, run_dir: Path, live: bool, env: Mapping[str, str]) -> int:
    """Have a job go on whose ``everstep run`` was killed, or queued again; the exit code of ``everstep``. With the run
    directory locked. ``spec``: as the words say now. Raises ConfigError: another job is here, or it is suspended."""
    from everstep.cli.run import home_files, run_terms

    before = read_spec(run_dir)
    if (before.script, before.capacity) != (spec.script, spec.capacity):
        raise ConfigError(
            f"run directory {run_dir}: holds another job, {before.script} on {before.capacity}; choose another "
            "--run-dir"
        )
    remove_sockets(run_dir)
    summary = read_summary(run_dir)
    if summary is not None:
        if env.get(RESTARTS, "0") == "0":
            raise ConfigError(f"run directory {run_dir}: the job is suspended; everstep unsuspend {run_dir} goes on")
        go_on(run_dir, summary.suspensions, "Slurm has queued it again")
    click.echo(f"everstep: {before.name}: goes on from the journal in {run_dir}")
    before, files = home_files(before, run_dir)
    return run_terms(before, run_dir, live, lambda: None, files)
