"""Trains in mode ps: the dense part and the tables are on the ps, and workers push the gradients of their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from everstep.api.dense import PsOptimizer
from everstep.api.listeners import WorkerRuntime
from everstep.api.ps_engine import PsEngine
from everstep.api.tables import TableSet
from everstep.api.trainer import OTHER_MODE, not_started, parameter_names, rows_only_read, with_model, without_training
from everstep.data.loader import Loader
from everstep.errors import ScriptError
from everstep.model.saved_optimizer import NO_STATE, has_momenta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PsTrainer:
    """Is a ``Trainer`` (``api.trainer``)."""

    processes, process_index, speaks = 1, 0, True

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self.tables = TableSet(runtime.client)
        self.engine = PsEngine(runtime, self.tables)
        self._gradients = self.engine.gradients
        self.models: list[nn.Module] = self._gradients.buffers.models

    def __repr__(self) -> str:
        return f"<PsTrainer of {len(self.models)} models>"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def chief(self) -> bool:
        return self._runtime.chief()

    def mesh(self) -> DeviceMesh:
        raise ScriptError(
            "job.device_mesh: in mode ps a worker is one process; processes of a worker need mode allreduce"
        )

    def digest(self) -> int:
        raise ScriptError("job.digest: in mode ps the model is on the ps; 'everstep audit' compares what they have")

    def check_sparse(self) -> None:
        """Do nothing: it is always possible."""

    def check_model(self, model: nn.Module) -> None:
        """Do nothing: ``optimizer`` looks at its parameters."""

    def pipeline(
        self, model: Any, *, schedule: Any, microbatches: int, loss_fn: Any, split: Sequence[int] | None
    ) -> nn.Module:
        raise ScriptError(OTHER_MODE.format("ps"))

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_([p for model in self.models for p in model.parameters()], max_norm, norm_type)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the ps-side twin of ``optimizer``."""
        taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for older in self._gradients.optimizers:
            gone = older.give_up(taken)
            self.tables.dense[:] = [group for group in self.tables.dense if group not in gone]
        known = self._gradients.optimizers
        twin = PsOptimizer(optimizer, len(known), self.engine.builder, parameter_names(self.models))
        known.append(twin)
        self.tables.dense += twin.groups
        return twin

    def track(self, objects: Mapping[str, Any]) -> None:
        """Schedulers count the job's steps; of others nothing is kept."""
        for obj in objects.values():
            self._gradients.schedule.track(obj)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def reduce_gradients(self) -> None:
        """Do nothing: gradients go to the ps at ``step``."""

    def steps(self, loader: Loader) -> Iterator[Any]:
        return self.engine.steps(loader)

    @contextmanager
    def evaluating(self, models: Sequence[nn.Module]) -> Iterator[None]:
        with rows_only_read(self.tables), without_training(models, self.engine.clock):
            yield

    def state_dict(self) -> dict[str, Any]:
        self.tables.refresh_dense()
        models = [m.state_dict() for m in self.models]
        return with_model({"models": models, "optimizers": [o.state_dict() for o in self._gradients.optimizers]})

    def check_load(self, state: dict[str, Any]) -> None:
        not_started(self.tables)
        if any(map(has_momenta, state.get("optimizers", ()))):
            raise ScriptError(NO_STATE.format("job.load_state_dict"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing: the models are loaded, and optimizers have no state."""

    def leave(self, error: str) -> None:
        self.engine.leave("the script ended")
