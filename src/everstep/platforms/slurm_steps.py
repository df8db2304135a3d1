"""Runs the nodes of a job as steps of ``srun`` in the allocation that ``everstep run`` itself stands in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from everstep.errors import ConfigError, PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import Offer
from everstep.platforms.cluster_nodes import NodeState, SeenNode
from everstep.platforms.slurm_cluster import ask_slurm
from everstep.platforms.slurm_jobs import (
    STEP_FORMAT,
    AgentSettings,
    SlurmSettings,
    environment,
    read_steps,
    step_script,
    step_words,
)

_END_S: Final = 40.0
_LOOK_S: Final = 0.5


def allocation_of(env: Mapping[str, str], nodes: int) -> str:
    """Return the number of the job that this process stands in. Raise ConfigError: it is in none, or in one that is too
    small."""
    job, there = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NUM_NODES", "1")
    if not job:
        raise ConfigError("--srun: this is no job of Slurm; submit it with sbatch, as examples/slurm_srun.sbatch")
    if there.isdigit() and int(there) < nodes:
        raise ConfigError(f"--nodes {nodes} --srun: job {job} has {there} nodes; give sbatch --nodes={nodes}")
    return job


class SlurmSteps:
    """Is the port to the nodes of one job in allocation ``job``. What this process starts ends with it: the allocation
    does."""

    every_s = 1.0

    def __init__(self, job: str, settings: SlurmSettings, agent: AgentSettings) -> None:
        self.name = f"slurm:{job}"
        self._job, self._settings, self._agent = job, settings, agent
        self._offer = Offer("", settings.partition, agent.market)
        self._steps: dict[NodeId, subprocess.Popen[bytes]] = {}
        self._ids: dict[NodeId, str] = {}

    def __repr__(self) -> str:
        return f"<{len(self._steps)} steps of {self.name}>"

    def offers(self) -> tuple[Offer, ...]:
        """Return nothing: an allocation does not grow."""
        return ()

    def look(self) -> tuple[SeenNode, ...]:
        self._ids = read_steps(ask_slurm(["squeue", "-h", "--steps", f"--jobs={self._job}", "-o", STEP_FORMAT]))
        return tuple(self._seen(node, step) for node, step in self._steps.items())

    def _seen(self, node: NodeId, step: subprocess.Popen[bytes]) -> SeenNode:
        code = step.poll()
        if code is None:
            state = NodeState.RUNNING if node in self._ids else NodeState.ASKED
            return SeenNode(node, state, self._offer)
        why = f"its step has ended with exit code {code}"
        return SeenNode(node, NodeState.ENDED, self._offer, failed=code != 0, done=code == 0, why=why)

    def add(self, nodes: Sequence[NodeId]) -> None:
        folder = Path(self._agent.run_dir) / "nodes"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for node in nodes:
                words = ["srun", *step_words(self._settings, self._job, node, self._agent.run_dir)]
                with (folder / f"{node}.srun.log").open("ab") as out:
                    self._steps[node] = subprocess.Popen(
                        [*words, "sh", "-c", step_script(self._agent, node)],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        env=environment(os.environ),
                        start_new_session=True,
                    )
        except OSError as error:
            raise PlatformError(f"slurm: srun cannot be started: {error.strerror or error}") from None

    def cancel(self, node: NodeId) -> None:
        step = self._steps.get(node)
        if step is not None and step.poll() is None:
            step.terminate()  # (srun hands it on)

    def close(self) -> None:
        """End all steps; what does not end in time is killed."""
        for node in self._steps:
            self.cancel(node)
        end = time.monotonic() + _END_S
        while any(step.poll() is None for step in self._steps.values()) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        left = [node for node, step in self._steps.items() if step.poll() is None]
        for node in left:
            if node in self._ids:
                with contextlib.suppress(PlatformError):
                    ask_slurm(["scancel", "--signal=KILL", self._ids[node]])
            self._steps[node].kill()
            self._steps[node].wait(_END_S)
