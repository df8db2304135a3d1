"""Talks to Slurm by its commands: each node of the job is a batch job of its own, and all of them bear one name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from everstep.errors import ConfigError, PlatformError, escaped
from everstep.ids import NodeId
from everstep.model.capacity import Market, Offer
from everstep.platforms.cluster_nodes import NodeState, SeenNode
from everstep.platforms.slurm_jobs import (
    FORMAT,
    AgentSettings,
    SlurmJob,
    SlurmSettings,
    environment,
    is_account_taken,
    is_preempted,
    job_script,
    job_words,
    read_jobs,
    read_partition,
    reclaim_s,
    refusal,
    refused_nodes,
    wanted_words,
)

LIMIT_S: Final = 30.0
_END_S: Final = 40.0
_LOOK_S: Final = 0.5


def run_slurm(words: Sequence[str], text: str = "") -> tuple[int, str, str]:
    """Run a command of Slurm; return its exit code and what it printed. Raise PlatformError."""
    try:
        done = subprocess.run(
            list(words),
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
            env=environment(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(f"slurm: {words[0]} did not answer within {LIMIT_S:g} s") from None
    except OSError as error:
        raise PlatformError(f"slurm: {words[0]} cannot be started: {error.strerror or error}") from None
    return done.returncode, done.stdout, done.stderr


def ask_slurm(words: Sequence[str], text: str = "") -> str:
    """Run a command of Slurm that must succeed; return what it printed. Raise PlatformError."""
    code, out, errors = run_slurm(words, text)
    if code:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        raise PlatformError(f"slurm: {words[0]}: {escaped(lines[-1] if lines else f'exit code {code}', 400)}")
    return out


def check_slurm(settings: SlurmSettings) -> dict[str, str]:
    """Return the fields of the partition in which the nodes will be. Raise ConfigError: there is no Slurm, no such
    partition or account, or no node that could ever have what is asked for; PlatformError: it does not answer."""
    for command in ("sbatch", "squeue", "scancel", "scontrol", "sinfo"):
        if shutil.which(command) is None:
            raise ConfigError(f"--on slurm: {command} is not installed here: run this on a login node of the cluster")
    shown = ask_slurm(["scontrol", "show", "partition", "-o"])
    partitions = {fields.get("PartitionName", ""): fields for fields in map(read_partition, shown.splitlines())}
    name = settings.partition or next((n for n, f in partitions.items() if f.get("Default") == "YES"), "")
    if not name:
        raise ConfigError(f"--on slurm: give --partition: there are {', '.join(sorted(filter(None, partitions)))}")
    if name not in partitions:
        there = ", ".join(sorted(filter(None, partitions)))
        raise ConfigError(f"--partition {name}: there is no such partition; there are {there}")
    account = settings.account
    if account and not is_account_taken(account, partitions[name]):
        of = {field: partitions[name].get(field) for field in ("AllowAccounts", "DenyAccounts")}
        fields = " ".join(f"{field}={value}" for field, value in of.items() if value)
        raise ConfigError(f"--account {account}: partition {name} takes no jobs of it ({fields})")
    code, _, errors = run_slurm(["sbatch", "--test-only", *wanted_words(settings)], "#!/bin/sh\n")
    if code:
        raise ConfigError(refused_nodes(settings, code, errors.splitlines()))
    return partitions[name]


def own_partition(env: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the partition that this process stands in; {}: Slurm does not say. Raise PlatformError."""
    name = env.get("SLURM_JOB_PARTITION", "")
    return read_partition(ask_slurm(["scontrol", "show", "partition", name, "-o"])) if name else {}


class SlurmCluster:
    """Is the port to Slurm for the nodes of one job. ``group``: the name that their batch jobs bear."""

    every_s = 3.0

    def __init__(self, group: str, settings: SlurmSettings, agent: AgentSettings, partition: dict[str, str]) -> None:
        self.name = f"slurm:{partition.get('PartitionName', settings.partition)}"
        self._group, self._settings, self._agent = group, settings, agent
        self._partition = partition.get("PartitionName", settings.partition)
        self._offer = Offer("", self._partition, agent.market)
        self._jobs: dict[NodeId, SlurmJob] = {}

    def __repr__(self) -> str:
        return f"<{len(self._jobs)} jobs of {self._group}>"

    def offers(self) -> tuple[Offer, ...]:
        shown = ask_slurm(["sinfo", "-h", "-N", "-p", self._partition, "-t", "idle", "-o", "%N"])
        count = len(set(shown.split()))
        return (Offer("", self._partition, self._agent.market, None, count),) if count else ()

    def look(self) -> tuple[SeenNode, ...]:
        words = ["squeue", "-h", "--states=all", f"--name={self._group}", "-O", FORMAT]
        found = read_jobs(ask_slurm(words), self._offer)
        self._jobs = {job.seen.node: job for job in found}
        return tuple(job.seen for job in found)

    def add(self, nodes: Sequence[NodeId]) -> None:
        folder = Path(self._agent.run_dir) / "nodes"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise PlatformError(f"slurm: {folder} cannot be made: {error.strerror or error}") from None
        for node in nodes:
            words = ["sbatch", *job_words(self._settings, self._group, node, self._agent.run_dir)]
            code, _, errors = run_slurm(words, job_script(self._agent, node))
            if code:
                raise PlatformError(f"slurm: {node} was refused: {refusal(code, errors.splitlines())}")

    def cancel(self, node: NodeId) -> None:
        job = self._jobs.get(node)
        if job is None or job.seen.state is NodeState.ENDED:
            return
        with contextlib.suppress(PlatformError):  # (it has ended meanwhile: the next look shows it)
            ask_slurm(["scancel", job.job])

    def close(self) -> None:
        """Cancel what bears the group's name, and wait until it is gone; what does not end in time is killed."""
        ask_slurm(["scancel", f"--name={self._group}"])
        end = time.monotonic() + _END_S
        while any(seen.state is not NodeState.ENDED for seen in self.look()):
            if time.monotonic() > end:
                ask_slurm(["scancel", "--signal=KILL", "--full", f"--name={self._group}"])
                return
            time.sleep(_LOOK_S)


def slurm_agent(python: str, at: str, run_dir: Path, workers: int, ps: int, partition: dict[str, str]) -> AgentSettings:
    """Return what the agents of a job in a partition are told."""
    market = Market.SPOT if is_preempted(partition) else Market.ON_DEMAND
    return AgentSettings(python, at, str(run_dir), workers, ps, market, reclaim_s(partition))
