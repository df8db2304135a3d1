"""Says of which job, worker and process a script is part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from everstep.api.listeners import WorkerRuntime
from everstep.api.trainer import Trainer
from everstep.config.spec import JobSpec
from everstep.ids import Slot

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class JobPlace:
    """Is the part of ``Job`` that tells a script where it runs. Nothing of it changes while the script runs."""

    def __init__(self, runtime: WorkerRuntime, trainer: Trainer) -> None:
        self._runtime, self._trainer = runtime, trainer

    @property
    def slot(self) -> Slot:
        """Return which worker this is, from 0; another process may take the slot over."""
        return self._runtime.slot

    @property
    def device(self) -> torch.device:
        """Return where this worker's model shall be in mode allreduce, ``model.to(job.device)`` before job.replicate:
        one of the GPUs of its node, which its workers take in turn, and which is the current one from now on
        (``.cuda()``); the CPU where there are none, with ``--processes-per-worker``, and in mode ps."""
        return self._trainer.device

    @property
    def processes_per_worker(self) -> int:
        """Return how many processes this worker has (``--processes-per-worker``); FSDP2 shards the models over them."""
        return self._trainer.processes

    @property
    def process_index(self) -> int:
        """Return which of the worker's processes this one is, from 0."""
        return self._trainer.process_index

    @property
    def device_mesh(self) -> DeviceMesh:
        """The worker's processes as a mesh of one dimension: ``fully_shard(module, mesh=job.device_mesh)``, before
        job.replicate and before the optimizer is made. It has one process if the job has no
        ``--processes-per-worker``. Raises ScriptError in mode ps."""
        return self._trainer.mesh()

    @property
    def seed(self) -> int:
        return self._runtime.spec.seed

    @property
    def spec(self) -> JobSpec:
        return self._runtime.spec

    @property
    def run_dir(self) -> str:
        return str(self._runtime.run_dir)
