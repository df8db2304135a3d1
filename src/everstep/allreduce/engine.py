"""The training step of a group: what happens around the script's iterations in mode allreduce.

One iteration of the script is one micro-batch of this member. In its last micro-batch of a step the gradients are
reduced while backward runs; at the end of backward the members vote, and with the outcome the step is committed at all
of them or at none. What the script does after backward (clipping, ``opt.step()``, schedulers) is local and
deterministic. Whatever an iteration changed that did not commit is put back at its end.
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.allreduce.ahead import AheadReader
from everstep.allreduce.devices import wait_for
from everstep.allreduce.flats import join_digests
from everstep.allreduce.logical import part_seed, seed_all
from everstep.allreduce.optimizer import GroupOptimizer
from everstep.allreduce.parts import settle
from everstep.allreduce.reducer import Reduced, Reducer
from everstep.allreduce.restore import SavedScript
from everstep.allreduce.sharded import ShardedReducer
from everstep.allreduce.step import GroupSession, LeaveJob, Outcome, Step, StepTables
from everstep.allreduce.units import Unit
from everstep.allreduce.warm import warm_up
from everstep.config.spec import JobSpec
from everstep.errors import EverstepError, NonFiniteGradientError, ScriptError
from everstep.ids import LeaseNo
from everstep.model.group import Group, Micro
from everstep.model.placement import Placement
from everstep.model.shard import Lease, Plan
from everstep.monitor import stepclock
from everstep.monitor.process import ProcessReadings
from everstep.monitor.stepclock import StepClock
from everstep.net import messages


class Batches(Protocol):
    """A loader."""

    batch_size: int
    largest_batch: int

    def plan(self) -> Plan: ...

    def read(self, epoch: int, lo: int, hi: int) -> Any: ...


class Steered(GroupSession, Protocol):
    """A session, as the master's orders steer it (from other threads)."""

    def grouped(self, group: Group) -> None: ...

    def welcomed(self) -> None: ...

    def leave_soon(self, status: int) -> bool: ...

    def fail(self, error: EverstepError) -> None: ...

    def finish(self) -> None: ...

    def close(self, error: str = "") -> None: ...


class PlacedTables(StepTables, Protocol):
    """Tables, as the master's orders steer them (from other threads)."""

    def placed(self, placement: Placement) -> None: ...

    def fail(self, error: EverstepError) -> None: ...

    def close(self) -> None: ...


class Carrier(Protocol):
    """The state, as peers and checkpoints copy it."""

    carried: bool


class GroupEngine:
    """See the top of this file. The public attributes are read by anyone; all else is the script's thread's."""

    def __init__(self, spec: JobSpec, slot: int, alone: bool) -> None:
        """``alone``: embedded in a single process, which computes exactly what plain PyTorch does."""
        self.spec, self.slot, self.alone = spec, slot, alone
        self.models: list[nn.Module] = []
        self.optimizers: list[GroupOptimizer] = []
        self.tracked: dict[str, Any] = {}
        self.inner: list[torch.optim.Optimizer] = []  # of ``optimizers``; kept by the state too
        self.session: Steered | None = None
        self.failure: EverstepError | None = None
        self.samples = self.batches = self.skipped = self.redone = 0
        self.values: dict[str, float] = {}
        self.step_number = 0
        self.state: Carrier | None = None
        self.tables: PlacedTables | None = None
        self.registered = 0  # loops begun
        self.unit = Unit(0, 1, [])  # the processes of this worker
        self.sharded = False  # the models are, over them
        self._saved = SavedScript(self.inner, self.tracked)
        self._reducer: Reducer | None = None
        self._step: Step | None = None
        self._reader: AheadReader | None = None
        self._options = 0  # digest of the learning rates
        self._last = self._in_script = self._stepped = self._rehearsing = False
        self._outcome: Outcome | None = None
        self._scaler_checked = False
        self._replicated: set[int] = set()
        self._params: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._devices: set[torch.device] = set()  # that parameters are on
        self.in_hand = 0  # samples of the pass that the script is at, or raised in
        self.loader_batch = self._largest_batch = 0  # samples; of each process, by the script
        self._busy_s = self._wait_s = 0.0
        self.clock = StepClock()
        self._process = ProcessReadings()
        self._began_at = time.monotonic()
        self._rate: deque[tuple[float, int]] = deque([(self._began_at, 0)], maxlen=12)
        self._hook = register_optimizer_step_pre_hook(self._optimizer_steps)
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<GroupEngine step {self.step_number} {self._step} outcome={self._outcome}>"

    # ------------------------------------------------------------ Listener: what the master orders

    def placed(self, placement: Placement) -> None:
        """A newer map of the ps."""
        if self.tables is not None:
            self.tables.placed(placement)

    def revoked(self, lease: LeaseNo) -> None:
        """There are no leases."""

    def held(self) -> tuple[Lease, ...]:
        return ()

    def grouped(self, group: Group) -> None:
        if self.session is not None:
            self.session.grouped(group)

    def welcomed(self) -> None:
        if self.session is not None:
            self.session.welcomed()

    def fail(self, error: EverstepError) -> None:
        self.failure = self.failure or error
        if self.tables is not None:
            self.tables.fail(error)
        if self.session is not None:
            self.session.fail(error)

    def finish(self) -> None:
        """The job is over."""
        if self.session is not None:
            self.session.finish()

    def leave_soon(self, status: int) -> bool:
        return self.session is not None and self.session.leave_soon(status)

    def beat(self) -> messages.Beat:
        now = time.monotonic()
        then, before = self._rate[0]
        self._rate.append((now, self.samples))
        spent_s = self._busy_s + self._wait_s
        readings = {
            "samples": float(self.samples),
            "batches": float(self.batches),
            "samples_per_s": (self.samples - before) / (now - then) if now > then else 0.0,
            "retried": float(self.redone),
            "skipped": float(self.skipped),
            "wait_fraction": self._wait_s / spent_s if spent_s else 0.0,
            "step": float(self.step_number),
            "memory_batch": float(self._largest_batch * self.unit.size),
            **self.clock.readings(),
            **self._process.readings(),
        }
        step = self._step
        if step is not None:
            readings.update(accum=float(len(step.micros)), global_batch=float(step.total))
            readings["batch"] = float(max((m.hi - m.lo for m in step.micros), default=0))
        if "loss" in self.values:
            readings["loss"] = self.values["loss"]
        return messages.Beat(readings=readings, values=dict(self.values))

    # ------------------------------------------------------------ what the script gives

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> GroupOptimizer:
        wrapped = GroupOptimizer(optimizer, self)
        self.optimizers.append(wrapped)
        self.inner.append(optimizer)
        return wrapped

    @property
    def in_loop(self) -> bool:
        return self._in_script

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only collect gradients; the next one outside of it reduces them too."""
        if self._reducer is None:
            raise ScriptError("job.no_sync() outside of job.steps()")
        self._reducer.no_sync(True)
        try:
            yield
        finally:
            self._reducer.no_sync(False)

    def _prepare(self) -> None:
        """Check what the script gave, and build the reducer for it."""
        if not self.models:
            raise ScriptError("no model: call model = job.replicate(model) before job.steps() (mode allreduce)")
        if not self.optimizers:
            raise ScriptError("no optimizer: call opt = job.optimizer(torch.optim...) before job.steps()")
        if torch.distributed.is_available() and torch.distributed.is_initialized() and not self.unit.meshed:
            raise ScriptError(
                "torch.distributed.init_process_group() was called: in mode allreduce everstep makes the process "
                "group; remove init_process_group and DistributedDataParallel"
            )
        names: dict[int, tuple[str, nn.Parameter]] = {}
        settle(self.models)
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                names.setdefault(id(p), (f"{i}.{name}" if len(self.models) > 1 else name, p))
        self._replicated = set(names)
        self._params = [p for _, p in names.values()]
        self._trainable = [p.requires_grad for p in self._params]
        for optimizer in self.optimizers:
            self._check_optimizer(optimizer)
        if self.tables is not None and self._has_scaler():
            raise ScriptError(
                "a GradScaler is tracked, and the gradients of tables on the ps would stay scaled: train without it"
            )
        self._check_devices()
        params = [(name, p) for name, p in names.values() if p.requires_grad]
        if not params:
            raise ScriptError("no parameter of the model requires a gradient: there is nothing to train")
        if self._reducer is not None:
            if [id(p) for p in self._reducer.params] == [id(p) for _, p in params]:
                return
            self._reducer.close()
        trained, labels = [p for _, p in params], [n for n, _ in params]
        if self.sharded:
            self._reducer = ShardedReducer(trained, labels, self.models, self._backward_over, self.unit)
        else:
            self._reducer = Reducer(trained, labels, self.models, self.spec.logical_workers, self._backward_over)
        self._reducer.clock = self.clock

    def _check_devices(self) -> None:
        devices = {p.device for p in self._params}
        if self._devices and devices != self._devices:
            was, now = (", ".join(sorted(map(str, d))) for d in (self._devices, devices))
            raise ScriptError(
                f"the model is on {now} now and was on {was} in the job.steps() before, which the group was "
                "connected for: move it before the first job.steps()"
            )
        self._devices = devices

    def _check_optimizer(self, optimizer: GroupOptimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._replicated:
                    raise ScriptError(
                        f"an optimizer given to job.optimizer trains a parameter of shape {tuple(p.shape)} of no "
                        "model: call job.replicate(model) for every model that is trained"
                    )
        if optimizer.scheduled() and not any(
            getattr(t, "optimizer", None) in (optimizer, optimizer.inner) for t in self._with_parts()
        ):
            raise ScriptError(
                "a learning rate scheduler works on an optimizer of the job and is not tracked: call "
                "job.track(scheduler=scheduler) before job.steps(), so that new workers and redone steps have its state"
            )

    def _with_parts(self) -> list[Any]:
        """Tracked objects, and the schedulers inside of those that chain several."""
        found = list(self.tracked.values())
        for obj in found:
            found += getattr(obj, "_schedulers", [])
        return found

    # ------------------------------------------------------------ the loop

    def steps(self, loader: Batches, dataset: int, until_epoch: int) -> Iterator[Any]:
        """This member's micro-batches of every step, until the group is through with the epochs."""
        session = self.session
        assert session is not None
        if self._in_script:
            raise ScriptError("job.steps() inside the loop of another job.steps() is not possible")
        self._prepare()
        if not self.alone:
            warm_up(self._params[0])
        self._thread = threading.get_ident()
        plan = loader.plan()
        largest = loader.largest_batch
        if self.spec.logical_workers and 0 < largest < loader.batch_size:
            raise ScriptError(
                f"largest_batch={largest} is below batch_size={loader.batch_size}: a logical worker's part of a step "
                "is computed at once, or its bits would be others; use a smaller batch_size, and more logical workers"
            )
        self.loader_batch, self._largest_batch = loader.batch_size, largest
        reader = self._reader = AheadReader(loader.read, ahead=not self.alone)
        try:
            if not self.alone:
                rehearsal = session.rehearsal(dataset, until_epoch, plan, loader.batch_size, largest)
                if rehearsal is not None:
                    yield from self._rehearse(session, rehearsal, loader)
            session.enter(dataset, until_epoch, plan, loader.batch_size, largest)
            if not self.alone and not self.spec.logical_workers:
                process = self.slot * self.unit.size + self.unit.index
                seed_all(part_seed(self.spec.seed, -1, process))  # e.g. for dropout: another stream on each worker
            for optimizer in self.optimizers:
                optimizer._share()  # a state that was copied into the inner ones may have replaced their groups
            while (step := self._next(session)) is not None:
                self._begin(step)
                assert self._reducer is not None
                for number, micro in enumerate(step.micros):
                    begin = time.perf_counter()
                    self.clock.switch(stepclock.DATA)
                    batch = self._read(reader, step, number, plan)
                    if self.tables is not None:
                        self.tables.take(step, batch)
                    self._open(step, micro, number == len(step.micros) - 1)
                    self._wait_s += time.perf_counter() - begin
                    begin = time.perf_counter()
                    self._in_script, self.in_hand = True, micro.hi - micro.lo
                    self.clock.begin(sum(m.hi - m.lo for m in step.micros))  # (of all passes)
                    yield batch
                    self._in_script, self.in_hand = False, 0
                    self._busy_s += time.perf_counter() - begin
                    self.batches += 1
                    self._close(session, step)
        except LeaveJob as leave:
            raise SystemExit(leave.status) from None
        finally:
            self.clock.switch(stepclock.OUTSIDE)
            reader.close()
            self._reader = None
            if self._in_script:
                self._break_off(session)
            if self.tables is not None:
                self.tables.release()
            if self._reducer is not None:
                self._reducer.close_micro()

    def _rehearse(self, session: GroupSession, step: Step, loader: Batches) -> Iterator[Any]:
        """One iteration of the script whose outcome is thrown away, as that of a step which is done again: what is slow
        for the first time (memory, kernels, compilers, the loader) is not to be waited for by others."""
        try:
            self._begin(step)
            micro = step.micros[0]
            batch = loader.read(step.epoch, micro.lo, micro.hi)
            self._open(step, micro, True)
            self._in_script = self._rehearsing = True
            self.in_hand = micro.hi - micro.lo
            yield batch
            self.in_hand = 0
        finally:  # also where the script leaves the loop
            self._in_script = self._rehearsing = False
            if self._reducer is not None:
                if self._outcome is None:
                    self._saved.save_large()
                self._reducer.close_micro()
                self._reducer.buffers.restore()
                self._reducer.put_back()
            self._saved.restore()
            self._step = None
            session.rehearsed()

    def _next(self, session: GroupSession) -> Step | None:
        self.clock.switch(stepclock.BARRIER)
        return session.begin()

    def _begin(self, step: Step) -> None:
        assert self._reducer is not None
        if [p.requires_grad for p in self._params] != self._trainable:  # the script froze or thawed some
            self._prepare()
        self._step = step
        self.step_number = step.number
        self._saved.save()
        self._reducer.begin_step(step)

    def _open(self, step: Step, micro: Micro, last: bool) -> None:
        assert self._reducer is not None
        self._last, self._outcome, self._stepped = last, None, False
        if self.spec.logical_workers:
            seed_all(part_seed(self.spec.seed, step.number, micro.part))
        self._reducer.begin_micro(micro, last)

    def _read(self, reader: AheadReader, step: Step, number: int, plan: Plan) -> Any:
        micro = step.micros[number]
        lo = micro.lo if micro.hi > micro.lo else max(step.lo, micro.lo - 2)  # empty: its neighbour's last samples
        batch = reader.get((step.epoch, lo, micro.hi))
        if number + 1 < len(step.micros):
            after = step.micros[number + 1]
            reader.begin((step.epoch, after.lo, after.hi))
        elif step.hi + step.total <= plan.samples:
            first = step.micros[0]
            reader.begin((step.epoch, first.lo + step.total, first.hi + step.total))
        return batch

    def _close(self, session: GroupSession, step: Step) -> None:
        """The script's iteration is over."""
        reducer = self._reducer
        assert reducer is not None
        if self.failure is not None:
            raise self.failure
        if not self._last:
            self._saved.save_large()
            reducer.end_micro()
            self._saved.restore()
            if self.tables is not None:
                self.tables.collect(reducer.weight)
                self.tables.release()
            return
        if self._outcome is None:
            self._vote()
        reducer.close_micro()
        if self.tables is not None:
            self.tables.release()
        if self._outcome is Outcome.COMMITTED:
            reducer.buffers.settle()
            reducer.stepped = self._stepped
            carried = not self._stepped and any(p.grad is not None for p in reducer.params)
        else:
            reducer.buffers.restore()
            reducer.put_back()
            self._saved.restore()
            carried = any(p.grad is not None for p in reducer.params)
        if self._outcome is Outcome.REDO:
            self.redone += 1
            return
        if self._outcome is Outcome.SKIPPED:
            self.skipped += 1
        self.samples += sum(m.hi - m.lo for m in step.micros)
        self.step_number = step.number + 1
        if self.state is not None:
            self.state.carried = carried
        session.done(step)
        if self.tables is not None and not self.tables.close_step(step):
            session.broken(step)

    def _break_off(self, session: GroupSession) -> None:
        """The script left the loop inside an iteration: what is committed is done, all else is as before the step."""
        self._in_script = False
        reducer, step = self._reducer, self._step
        if reducer is None or step is None or self.failure is not None:
            return
        if self._last and self._outcome in (Outcome.COMMITTED, Outcome.SKIPPED):
            self._close(session, step)
            return
        reducer.buffers.restore()
        reducer.put_back()
        self._saved.restore()

    # ------------------------------------------------------------ the vote

    def _backward_over(self) -> None:
        if self._last:
            self._vote()
        else:
            self._saved.save_large()

    def _vote(self) -> None:
        """Reduce what is left, vote, and put the gradients where the script expects them."""
        reducer, step, session = self._reducer, self._step, self.session
        assert reducer is not None
        assert step is not None
        assert session is not None
        if self._rehearsing:
            if not self.spec.logical_workers:  # (of which there is one part)
                reducer.finish()
            self._outcome = Outcome.REDO
            self._saved.save_large()
            reducer.place(False)
            return
        wait_for(self._devices)  # kernels of backward are this member's own time, not the group's
        self.clock.computed(sum(m.hi - m.lo for m in step.micros))
        self.clock.switch(stepclock.BARRIER)
        begin = time.perf_counter()
        if any(p.requires_grad and not was for p, was in zip(self._params, self._trainable, strict=True)):
            raise ScriptError(
                "requires_grad of a parameter was turned on between the begin of an iteration and the end of its "
                "backward(): do it after opt.step(), then it is reduced from the next step on"
            )
        reduced = reducer.finish(self._meanwhile)
        if reduced is not None and self.tables is not None:
            reduced = self._with_tables(reduced, step)
        if reduced is None:
            session.broken(step)
            self._outcome = Outcome.REDO
        else:
            nonfinite = not reduced.finite and not self._has_scaler()
            if nonfinite and self.spec.nonfinite == "raise":
                raise self._nonfinite(step)
            digest = 0 if not reduced.finite else join_digests([reduced.digest, self._options])
            self._outcome = session.vote(step, digest, nonfinite)
        if self.tables is not None:
            self.tables.voted(step, self._outcome)
        if self._outcome is Outcome.COMMITTED:
            reducer.commit_buffers()
        else:
            self._saved.save_large()
        reducer.place(self._outcome is Outcome.COMMITTED)
        self._wait_s += time.perf_counter() - begin
        self.clock.switch(stepclock.UPDATE)

    def _meanwhile(self) -> None:
        """While gradients are reduced this thread has nothing else to do."""
        self._options = self._options_digest()
        if self._reader is not None:
            self._reader.fill()

    def _with_tables(self, reduced: Reduced, step: Step) -> Reduced | None:
        """The gradients of the tables' rows go along with those of the parameters."""
        assert self.tables is not None
        assert self._reducer is not None
        self.tables.collect(self._reducer.weight)
        exchanged = self.tables.exchange(step)
        if exchanged is None:
            return None
        digest, finite = exchanged
        return Reduced(join_digests([reduced.digest, digest]), reduced.finite and finite)

    def _options_digest(self) -> int:
        """Of the learning rates: workers whose rates differ would drift apart unseen."""
        lrs = [float(g.get("lr", 0.0)) for o in self.inner for g in o.param_groups]
        return zlib.crc32(struct.pack(f"{len(lrs)}d", *lrs))

    def _has_scaler(self) -> bool:
        """Whether a GradScaler looks after gradients that are not finite."""
        return any(hasattr(t, "get_scale") and t.is_enabled() for t in self.tracked.values())

    def _nonfinite(self, step: Step) -> NonFiniteGradientError:
        assert self._reducer is not None
        name = self._reducer.first_nonfinite()
        error = NonFiniteGradientError(
            f"the gradient of {repr(name) if name else 'a table'} has NaN or Inf in samples {step.lo}..{step.hi} of "
            f"epoch {step.epoch} (step {step.number}); nothing of that step was applied: lower the learning rate or "
            "clip gradients, or run with --nonfinite skip"
        )
        self.failure = self.failure or error
        return error

    # ------------------------------------------------------------ Stepper: what optimizers ask

    def may_step(self, optimizer: GroupOptimizer, caller: Any) -> float | None:
        if not self._in_script or self._reducer is None or self._step is None:
            raise ScriptError("opt.step() outside of job.steps(): gradients belong to a batch of the loop")
        if not self._scaler_checked:
            self._scaler_checked = True
            self._check_scaler(caller)
        if self._last and self._outcome is None:
            self._vote()
        return self._step.lr_factor if self._last and self._outcome is Outcome.COMMITTED else None

    def has_stepped(self, optimizer: GroupOptimizer) -> None:
        self._stepped = True
        if self._reducer is not None:
            self._reducer.used_by({id(p) for g in optimizer.param_groups for p in g["params"]})

    def check_group(self, param_group: dict[str, Any]) -> None:
        if not self._in_script:
            return  # ``steps`` looks at all of them
        given = param_group["params"]
        given = param_group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        for p in given:
            if id(p) not in self._replicated:
                raise ScriptError(
                    f"opt.add_param_group in the loop: a parameter of shape {tuple(p.shape)} that no model had when "
                    "job.steps() began: nobody else would have it; build it before, with requires_grad_(False)"
                )

    def _check_scaler(self, frame: Any) -> None:
        for _ in range(8):
            if frame is None:
                return
            if frame.f_code.co_filename.endswith("grad_scaler.py"):
                scaler = frame.f_locals.get("self")
                if scaler is not None and not any(t is scaler for t in self.tracked.values()):
                    raise ScriptError(
                        "a GradScaler is used and not tracked: call job.track(scaler=scaler) before job.steps(), so "
                        "that all workers scale alike"
                    )
            frame = frame.f_back

    def _optimizer_steps(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Before any optimizer of this process steps."""
        if not self._in_script or isinstance(optimizer, GroupOptimizer) or threading.get_ident() != self._thread:
            return
        if any(optimizer is inner for inner in self.inner):
            if self._last and self._outcome is Outcome.COMMITTED:
                return
            raise ScriptError(
                "the optimizer given to job.optimizer was stepped itself: use what job.optimizer returned"
            )
        for group in optimizer.param_groups:
            if any(id(p) in self._replicated for p in group["params"]):
                raise ScriptError(
                    f"a torch.optim.{type(optimizer).__name__} that job.optimizer does not know steps on parameters of "
                    "a replicated model: wrap it, opt = job.optimizer(opt), before job.steps()"
                )

    def close(self, error: str = "") -> None:
        """The script is over."""
        self._hook.remove()
        if self._reducer is not None:
            self._reducer.close()
        try:
            if self.session is not None:
                self.session.close(error)
        finally:
            if self.tables is not None:
                self.tables.close()
