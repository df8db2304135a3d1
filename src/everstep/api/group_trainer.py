"""Trains in mode allreduce: every worker has the whole model, and all train it together, step by step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from everstep.allreduce.devices import device_for
from everstep.allreduce.dtensor import gathered, settle
from everstep.allreduce.group_engine import GroupEngine, check_max_norm
from everstep.allreduce.leader import FollowerSession, LeaderSession, UnitState
from everstep.allreduce.replica_group import Unit
from everstep.allreduce.replica_sync import ReplicaSync
from everstep.allreduce.session import Session
from everstep.allreduce.sharded import check_model
from everstep.allreduce.state import ReplicaState
from everstep.api.group_tables import GroupTables
from everstep.api.listeners import WorkerRuntime
from everstep.api.tables import TableSet
from everstep.api.trainer import OTHER_MODE, not_started, rows_only_read, with_model, without_training
from everstep.brain.events import Fenced, PlanRegistered, Refused, Registered
from everstep.data.loader import Loader
from everstep.errors import DataError, FencedError, InternalError, ScriptError

_MASTER_S = 300.0  # a master may be away so long


class GroupTrainer:
    """Is a ``Trainer`` (``api.trainer``) for mode allreduce."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        spec = runtime.spec
        if spec.logical_workers and not spec.threads_per_worker:
            torch.set_num_threads(1)  # the number of threads changes the order of sums, and so the bits
        engine = self._make_engine()
        self.engine = engine
        self.models = engine.models
        unit = self._unit = engine.unit = Unit.from_environment(os.environ)
        unit.chief = runtime.slot == 0
        self.state = self._make_state()
        engine.state = self.state
        self._epochs_done: dict[str, int] = {}
        self._unforbid = _forbid_process_groups()
        self.tables = TableSet(runtime.client)
        self.tables.clock = engine.clock
        if not unit.leads:
            engine.session = FollowerSession(self.state, unit)
            return
        sync = ReplicaSync(self.state, runtime)
        session = Session(runtime, self.state, sync)
        self._with_copies(session, sync)
        engine.session = self._lead(session) if unit.size > 1 else session
        if spec.ps:
            tables = engine.tables = session.tables = GroupTables(runtime, self.tables)
            self.state.rows = tables.carried
            tables.scale = engine.loss_scale

    # ------------------------------------------------------------ what the group is made of

    def _make_engine(self) -> GroupEngine:
        return GroupEngine(self._runtime.spec, self._runtime.slot, alone=self._runtime.embedded)

    def _make_state(self) -> ReplicaState:
        engine = self.engine
        if engine.unit.size > 1 and engine.unit.leads:
            return UnitState(engine.models, engine.inner, engine.tracked, engine.unit)
        return ReplicaState(engine.models, engine.inner, engine.tracked)

    def _with_copies(self, session: Session, sync: ReplicaSync) -> None:
        """Prepare what is kept of the state beside checkpoints: nothing."""

    def _lead(self, session: Session) -> LeaderSession:
        """Return the session of a leader with followers."""
        return LeaderSession(session, self._unit)

    # ------------------------------------------------------------ facts

    def digest(self) -> int:
        return ReplicaState.digest(self.state) & (1 << 64) - 1

    @property
    def device(self) -> torch.device:
        if self._unit.size > 1:
            return torch.device("cpu")
        device = device_for(os.environ, torch.cuda.device_count())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    @property
    def chief(self) -> bool:
        return self._runtime.chief() if self._unit.size == 1 else self._unit.chief

    @property
    def speaks(self) -> bool:
        return self._unit.leads

    @property
    def processes(self) -> int:
        return self._unit.size

    @property
    def process_index(self) -> int:
        return self._unit.index

    def mesh(self) -> DeviceMesh:
        life = f"unit-{self._runtime.slot}.{self._runtime.incarnation}"
        return self._unit.mesh(self._runtime.run_dir / "sock" / life)

    # ------------------------------------------------------------ the model

    def check_sparse(self) -> None:
        if not self._runtime.spec.ps:
            raise ScriptError(
                "job.sparse in mode allreduce: no ps to put tables on; run with --mode allreduce --ps 1 (or more), or "
                "leave job.sparse out"
            )
        if self.engine.in_loop or self.engine.registered:
            raise ScriptError("job.sparse after job.steps(): call it before the loop")

    def check_model(self, model: nn.Module) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ScriptError(
                f"job.replicate got a {type(model).__name__}: give it the plain model, everstep reduces the gradients"
            )
        for name, p in model.named_parameters():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ScriptError(
                    f"job.replicate: parameter {name!r} has no shape yet (a lazy module): run the model on one batch "
                    "first"
                )
        if not self._runtime.embedded:
            check_max_norm([model])
        sharded = check_model(model, self._unit, self._unit.mesh_made)
        if self.models and sharded != self.engine.sharded:
            raise ScriptError("job.replicate: one model is sharded and another one is not; shard both, or none")
        self.engine.sharded = sharded

    def pipeline(
        self, model: Any, *, schedule: Any, microbatches: int, loss_fn: Any, split: Sequence[int] | None
    ) -> nn.Module:
        raise ScriptError(OTHER_MODE.format(self._runtime.spec.mode))

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_([p for model in self.models for p in model.parameters()], max_norm, norm_type)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ScriptError(
                "torch.optim.LBFGS runs backward several times in one step, which a group cannot commit as one: use "
                "another optimizer"
            )
        wrapped = self.engine.add_optimizer(optimizer)
        if self.engine.tables is not None:
            self.engine.tables.hold(wrapped, optimizer)
        return wrapped

    def track(self, objects: Mapping[str, Any]) -> None:
        for name, obj in objects.items():
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                raise ScriptError(
                    f"job.track({name}=...): a {type(obj).__name__} has no state_dict and load_state_dict"
                )
            if isinstance(obj, torch.optim.Optimizer):
                raise ScriptError(f"job.track({name}=...): optimizers go to job.optimizer")
            if self.engine.tracked.get(name, obj) is not obj:
                raise ScriptError(f"job.track({name}=...): another object is tracked by that name")
        self.engine.tracked.update(objects)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            yield

    def reduce_gradients(self) -> None:
        self.engine.reduce_gradients()

    # ------------------------------------------------------------ the loop

    def steps(self, loader: Loader) -> Iterator[Any]:
        if self.engine.failure is not None:
            raise self.engine.failure
        plan = loader.plan()
        if self._runtime.spec.ps:
            if not self.tables.infos:
                raise ScriptError(
                    f"the job has {self._runtime.spec.ps} ps, and the script puts no table on them: call "
                    "model = job.sparse(model) before job.replicate, or run without --ps"
                )
            self.tables.declare()
            self.tables.asides.forget()
            plan = msgspec.structs.replace(plan, shard_samples=plan.samples)  # the ps count by epoch: see tables.steps
        begin = self._epochs_done.get(plan.name, 0)
        until = begin + loader.epochs
        request = PlanRegistered(plan, self.engine.registered + 1, begin, until)
        answer = self._runtime.call(request, _MASTER_S)
        if isinstance(answer, Refused):
            raise DataError(answer.error)
        if isinstance(answer, Fenced):
            raise FencedError(answer.reason)
        if not isinstance(answer, Registered):
            raise InternalError(f"Register was answered with {answer!r}")
        self.engine.registered += 1
        self._epochs_done[plan.name] = until
        return self.engine.steps(loader, answer.dataset, until)

    @contextmanager
    def evaluating(self, models: Sequence[nn.Module]) -> Iterator[None]:
        if self._runtime.spec.ps:
            with rows_only_read(self.tables), without_training(models, self.engine.clock):
                yield
            return
        with without_training(models, self.engine.clock):
            try:
                yield
            finally:
                settle(models)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        settle(self.models)
        state = {
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.engine.optimizers],
            "tracked": {name: obj.state_dict() for name, obj in self.engine.tracked.items()},
        }
        return with_model(gathered(state) if self.engine.sharded else state)

    def check_load(self, state: dict[str, Any]) -> None:
        if self.engine.registered:
            raise ScriptError("job.load_state_dict: only before job.steps()")
        not_started(self.tables)
        if self.engine.sharded:
            raise ScriptError(
                "job.load_state_dict of a sharded model: load the plain model before fully_shard (everstep resume goes "
                "on from a checkpoint of the job)"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        optimizers = state.get("optimizers", [])
        if len(optimizers) != len(self.engine.optimizers):
            raise ScriptError(
                f"the state is of {len(optimizers)} optimizers, this script has {len(self.engine.optimizers)}"
            )
        for optimizer, values in zip(self.engine.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(values)
        for name, values in state.get("tracked", {}).items():
            if name not in self.engine.tracked:
                raise ScriptError(f"the state has {name!r}, which is not tracked: call job.track({name}=...) first")
            self.engine.tracked[name].load_state_dict(values)

    # ------------------------------------------------------------ the end

    def leave(self, error: str) -> None:
        self._unforbid()
        self.engine.close(error)
        if self._runtime.embedded:
            self._unit.close()


def _forbid_process_groups() -> Any:
    """Forbid a script to make its own process group, in which it would wait for peers that never come. Returns the
    undo."""
    if not torch.distributed.is_available():
        return lambda: None
    places = [torch.distributed, sys.modules["torch.distributed.distributed_c10d"]]
    originals = [p.init_process_group for p in places]

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ScriptError(
            "torch.distributed.init_process_group() was called: in mode allreduce everstep makes the process group; "
            "remove init_process_group and DistributedDataParallel"
        )

    for place in places:
        place.init_process_group = refuse  # type: ignore[attr-defined]

    def undo() -> None:
        for place, original in zip(places, originals, strict=True):
            place.init_process_group = original  # type: ignore[attr-defined]

    return undo
