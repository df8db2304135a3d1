"""Trains in mode pipeline: every worker is a replica of the model in stages, one process each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from everstep.allreduce.group_engine import GroupEngine
from everstep.allreduce.leader import LeaderSession
from everstep.allreduce.replica_sync import ReplicaSync
from everstep.allreduce.serialize import Unpacker
from everstep.allreduce.session import Session
from everstep.allreduce.stage_parts import WholeModel
from everstep.allreduce.state import ReplicaState
from everstep.api.group_trainer import GroupTrainer
from everstep.api.listeners import WorkerRuntime
from everstep.errors import EverstepError, ScriptError
from everstep.model.copy_places import CopyPlace
from everstep.model.stage_spans import StageIteration
from everstep.monitor.span_log import SpanLog
from everstep.net.auth import load_secret, worker_identity
from everstep.net.data import DataClient
from everstep.net.rendezvous import SECRET_FILE
from everstep.pipeline.copy_checkpoint import CopyCheckpoint
from everstep.pipeline.copy_elsewhere import CONNECT_S, NeighbourWatch, copy_places
from everstep.pipeline.copy_recovery import KeptCopy
from everstep.pipeline.copy_sender import CopySender
from everstep.pipeline.copy_slots import CopyMemory, CopyMeta
from everstep.pipeline.engine import PipelineEngine
from everstep.pipeline.idle_board import IdleEntry
from everstep.pipeline.known_schedules import check_schedule, homes, kind_of, parts_wanted
from everstep.pipeline.links import add_up, tell_numbers
from everstep.pipeline.parts import cut
from everstep.pipeline.spans import SpanRecorder, copy_rate
from everstep.pipeline.stage_copies import StageCopies
from everstep.pipeline.staged_model import StagedModel, parts_of
from everstep.pipeline.stages import StageRunner, WholeRunner
from everstep.pipeline.stages_state import StagesState, digest_of
from everstep.policies.idle_spans import SpanSampler


class PipelineTrainer(GroupTrainer):
    """Is a ``Trainer`` (``api.trainer``) for mode pipeline."""

    engine: PipelineEngine

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._whole = WholeModel()
        self._log: SpanLog | None = None
        self._session: Session | None = None  # of the first stage
        self._sync: ReplicaSync | None = None
        self._watch: NeighbourWatch | None = None
        self._copies_of = -1  # lineage that the copies are of
        stages = runtime.spec.stages
        self._memory: CopyMemory | None = None
        if not runtime.embedded and runtime.spec.copy_every != "off":
            self._memory = CopyMemory.from_environment(os.environ, stages)
        super().__init__(runtime)

    # ------------------------------------------------------------ what the group is made of

    def _make_engine(self) -> GroupEngine:
        return PipelineEngine(self._runtime.spec, self._runtime.slot, alone=self._runtime.embedded)

    def _make_state(self) -> ReplicaState:
        engine = self.engine
        if engine.unit.size == 1:
            return ReplicaState(engine.models, engine.inner, engine.tracked)
        return StagesState(engine.models, engine.inner, engine.tracked, engine.unit, self._whole)

    def _with_copies(self, session: Session, sync: ReplicaSync) -> None:
        if self._memory is None:
            return
        self._session, self._sync = session, sync
        sync.copy = KeptCopy.find(self._memory, self._whole)

    def _look_elsewhere(self, memory: CopyMemory, sync: ReplicaSync) -> None:
        """Find, as the first stage, a copy that is newer than that of this machine, and who keeps copies from now
        on."""
        runtime, own = self._runtime, sync.copy
        joined = bool(runtime.spec.bind)  # (else there is no other node)
        if joined and runtime.incarnation > 1 and (own is None or own.incarnation < runtime.incarnation - 1):
            with contextlib.suppress(EverstepError):  # (without the master there is no job)
                places, of = copy_places(runtime).places, (runtime.slot, runtime.spec.stages)
                sync.copy = KeptCopy.find_elsewhere(places, self._connect_copies, *of, self._whole, own)
        self._watch = NeighbourWatch(runtime, memory.page, runtime.node, not joined)

    def _connect_copies(self, place: CopyPlace) -> DataClient:
        runtime = self._runtime
        identity = worker_identity(runtime.slot, runtime.incarnation, runtime.node)
        secret = load_secret(runtime.run_dir / SECRET_FILE)
        tls = runtime.spec.tls
        return DataClient(place.address, secret=secret, identity=identity, tls=tls, connect_timeout_s=CONNECT_S)

    def _lead(self, session: Session) -> LeaderSession:
        made = LeaderSession(session, self._unit, spread=1)
        made.before_step = self._choose_copy
        return made

    def _choose_copy(self, step: int) -> None:
        """Say whether the state before ``step`` is copied; of the first stage, before the others hear of the step."""
        copies, sync = self.engine.copies, self._sync
        if copies is None or sync is None:
            return
        if sync.own_lineage != self._copies_of:  # the lineage is another one, or this process is new
            known = self._copies_of >= 0
            self._copies_of = sync.own_lineage
            copies.adopt(sync.adopted if sync.adopted == step or known else -1)
        sync.writer.next_step(step)
        copies.choose(step)

    def _about_copy(self) -> CopyMeta | None:
        if self._session is None or self._sync is None:
            return None
        runtime, state = self._runtime, self.state
        steps = self._session.commits.open()
        return CopyMeta(state.position, state.loop, self._sync.own_lineage, runtime.slot, runtime.incarnation, steps)

    def _begin_copies(self, recorder: SpanRecorder) -> None:
        """Copy this stage in its waits, from the first step on."""
        unit = self._unit
        if self._memory is None:
            return
        every = self._runtime.spec.copy_every
        life = int(self._runtime.incarnation)
        sender = entry = None
        if self._sync is not None:
            self._look_elsewhere(self._memory, self._sync)
        if self._runtime.spec.bind:
            me = self._runtime.slot, self._runtime.incarnation
            page, at_once = self._memory.page, every != "auto"
            entry = IdleEntry(self._runtime.run_dir, self._runtime.slot, unit.index)
            sender = CopySender(page, unit.index, me, self._connect_copies, at_once=at_once)
        limit = 0 if every == "auto" else int(every)
        copies = StageCopies(self._memory, unit.index, life, self.state, limit, sender=sender, entry=entry)
        self.engine.copies, self.engine.about_copy = copies, self._about_copy
        recorder.copies = unit.waits = copies
        if self._sync is not None:
            self._sync.writer.copies = CopyCheckpoint(self._memory, copies, self._whole, life)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    # ------------------------------------------------------------ the model

    def pipeline(
        self, model: Any, *, schedule: Any, microbatches: int, loss_fn: Any, split: Sequence[int] | None
    ) -> StagedModel:
        if self.models:
            raise ScriptError("job.pipeline twice: a job in stages has one model")
        if not callable(loss_fn):
            raise ScriptError(f"job.pipeline(loss_fn={loss_fn!r}): a function of (output, target), the mean of samples")
        kind_of(schedule)
        unit = self._unit
        stages = unit.size
        known = not self._runtime.embedded  # alone nobody says how many stages there are
        parts = cut(
            model,
            split,
            parts_wanted(schedule, stages) if known else 1,
            lambda count: homes(schedule, stages, count) if known else [0] * count,
            unit.index,
        )
        check_schedule(schedule, stages, len(parts.children) if known else parts_wanted(schedule, 1), microbatches)
        self._whole.parameters, self._whole.buffers = parts.names, parts.buffers
        own = parts_of(parts)
        runner: StageRunner | WholeRunner = WholeRunner(own, microbatches)
        if stages > 1:
            self._connect()
            runner = StageRunner(own, homes(schedule, stages, len(parts.children)), unit.index, schedule, microbatches)
        made = StagedModel(parts, runner, microbatches, loss_fn, self.engine)
        if stages > 1:
            self._begin_copies(runner.recorder)
            log = self._log = SpanLog(self._runtime.run_dir, self._runtime.slot, unit.index)
            sampler, count, rate = SpanSampler(), len(parts.children), copy_rate()

            def keep(recorder: SpanRecorder, samples: int) -> None:
                seen = sampler.take(self.engine.generation, samples)
                if seen < 0:
                    return
                copies = self.engine.copies
                iteration = StageIteration(
                    worker=self._runtime.slot,
                    stage=unit.index,
                    stages=stages,
                    parts=count,
                    microbatches=microbatches,
                    schedule=schedule.__name__,
                    step=self.engine.step_number,
                    generation=self.engine.generation,
                    samples=samples,
                    seen=seen,
                    began_s=recorder.began_s,
                    spans=tuple(recorder.spans),
                    state_bytes=self._state_bytes(),
                    copy_bytes_per_s=(copies.bytes_per_s if copies is not None else 0.0) or rate,
                    copies=copies.totals if copies is not None else None,
                )
                log.write(iteration)

            made.on_batch = keep
        return made

    def _state_bytes(self) -> int:
        """Return the bytes of this stage: parameters, buffers, and what optimizers keep."""
        model = self.models[0]
        tensors = [*model.parameters(), *model.buffers()]
        kept = [value for opt in self.engine.inner for state in opt.state.values() for value in state.values()]
        tensors += [value for value in kept if isinstance(value, torch.Tensor)]
        return sum(value.numel() * value.element_size() for value in tensors)

    def _connect(self) -> None:
        super().mesh()

    def mesh(self) -> DeviceMesh:
        raise ScriptError("job.device_mesh in mode pipeline: a stage is one process, and is not sharded")

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, StagedModel):
            raise ScriptError(
                "job.replicate in mode pipeline: give the model to job.pipeline(model, schedule=..., microbatches=..., "
                "loss_fn=...), which cuts it into stages"
            )

    def check_sparse(self) -> None:
        raise ScriptError("job.sparse in mode pipeline: a model in stages has no tables on the ps")

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        if self._unit.size > 1 and not type(optimizer).__module__.startswith("torch.optim"):
            raise ScriptError(
                f"job.optimizer({type(optimizer).__name__}) in a job of several stages: everstep does not know whether "
                "it looks at all parameters at once, of which a process has those of its stage; use one of torch.optim"
            )
        return super().optimizer(optimizer)

    def track(self, objects: Mapping[str, Any]) -> None:
        for name, obj in objects.items():
            if hasattr(obj, "get_scale"):
                raise ScriptError(
                    f"job.track({name}=...): a GradScaler looks at the gradients of one stage; train with bfloat16, "
                    "which needs none"
                )
            if self._unit.size > 1 and hasattr(obj, "state_dict") and _holds_tensors(obj.state_dict()):
                raise ScriptError(
                    f"job.track({name}=...): a {type(obj).__name__} that holds tensors, in a job of several stages: it "
                    "would be of one stage; schedulers and counters can be tracked"
                )
        super().track(objects)

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        reducer = self.engine.gradients()
        found = reducer.norms(self._whole.parameters, norm_type)
        if self._unit.size > 1:
            add_up(found)
        norms = found[0][found[1] > 0].to(torch.get_default_dtype())
        total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
        reducer.scale(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    # ------------------------------------------------------------ state

    def digest(self) -> int:
        if not isinstance(self.state, StagesState):
            return super().digest()
        serialized = self.state.together()
        value = tell_numbers(torch.tensor([digest_of(serialized) if self._unit.leads else 0]), 0)
        return int(value) & (1 << 64) - 1

    def state_dict(self) -> dict[str, Any]:
        if not isinstance(self.state, StagesState):
            return super().state_dict()
        serialized = self.state.together()
        values: dict[str, torch.Tensor] = {}
        if self._unit.leads:
            source = Unpacker(serialized, "the state")
            numbers = (*source.header.parameters, *source.header.buffers)
            values = {source.name(number): source.copy(number) for number in numbers}
        tracked = {name: obj.state_dict() for name, obj in self.engine.tracked.items()}
        return {"model": values, "models": [values], "tracked": tracked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._unit.size > 1:
            _refuse_load()
        super().load_state_dict(state)

    def check_load(self, state: dict[str, Any]) -> None:
        if self._unit.size > 1:
            _refuse_load()
        super().check_load(state)

    def leave(self, error: str) -> None:
        super().leave(error)
        if self._watch is not None:
            self._watch.close()
        if self._log is not None:
            self._log.close()


def _refuse_load() -> NoReturn:
    raise ScriptError(
        "job.load_state_dict in a job of several stages: load the parts before job.pipeline (everstep resume goes on "
        "from a checkpoint of the job, with any number of stages)"
    )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    if isinstance(value, Mapping):
        return any(_holds_tensors(one) for one in value.values())
    return isinstance(value, list | tuple) and any(_holds_tensors(one) for one in value)
