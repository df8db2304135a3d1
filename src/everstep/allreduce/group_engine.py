"""Does the training step of a group: what happens around the script's iterations in mode allreduce.

One iteration of the script is one micro-batch of this member. In its last micro-batch of a step the gradients are
reduced while backward runs; at the end of backward the members vote, and with the outcome the step is committed at all
of them or at none. What the script does after backward (clipping, ``opt.step()``, schedulers) is local and
deterministic. Whatever an iteration changed that did not commit is put back at its end.

A script with several backward passes and steps in one iteration (a GAN) has several *rounds* in it. Once that is seen,
the vote is at the iteration's end, and what its steps did before a vote that fails is put back too.
"""

from __future__ import annotations

import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.allreduce.batch_prefetch import PrefetchReader
from everstep.allreduce.counting import Enumerated, SampleCounts
from everstep.allreduce.devices import wait_for
from everstep.allreduce.dtensor import settle
from everstep.allreduce.gradient_buckets import join_digests
from everstep.allreduce.logical import LoopStreams, part_seed
from everstep.allreduce.optimizer import GroupOptimizer
from everstep.allreduce.outside import STEPS as OUTSIDE_STEPS
from everstep.allreduce.outside import Outside
from everstep.allreduce.reducer import ReducedStep, Reducer
from everstep.allreduce.replica_group import Unit
from everstep.allreduce.rollback import SavedScript
from everstep.allreduce.sharded import ShardedReducer, refuse_replaced
from everstep.allreduce.step import Collective, GroupSession, LeaveJob, StepAttempt, StepTables, VoteOutcome
from everstep.allreduce.warm_up import warm_up
from everstep.config.spec import JobSpec
from everstep.data.loader import left_before
from everstep.data.random_streams import STREAMS, seed_range, seed_streams
from everstep.errors import EverstepError, NonFiniteGradientError, PlatformError, ScriptError
from everstep.ids import LeaseNo
from everstep.model.graph_readings import GraphReading
from everstep.model.group import Group, Micro
from everstep.model.placement import Placement
from everstep.model.shard import Lease, ShardSchedule
from everstep.monitor import stepclock
from everstep.monitor.process_readings import ProcessReadings
from everstep.monitor.stepclock import StepClock
from everstep.net import messages


class Batches(Protocol):
    """Is a loader."""

    batch_size: int
    largest_batch: int
    epochs: int

    def plan(self) -> ShardSchedule: ...

    def read(self, epoch: int, lo: int, hi: int) -> Any: ...


class Steered(GroupSession, Protocol):
    """Is a session, as the master's orders steer it (from other threads)."""

    def grouped(self, group: Group) -> None: ...

    def welcomed(self) -> None: ...

    def leave_soon(self, status: int) -> bool: ...

    def fail(self, error: EverstepError) -> None: ...

    def finish(self) -> None: ...

    def close(self, error: str = "") -> None: ...


class PlacedTables(StepTables, Protocol):
    """Is the tables, as the master's orders steer them (from other threads)."""

    def placed(self, placement: Placement) -> None: ...

    def check_state(self, optimizer: Any) -> None: ...

    def fail(self, error: EverstepError) -> None: ...

    def close(self) -> None: ...


class CopiedState(Protocol):
    """Is the state, as peers and checkpoints copy it."""

    carried: bool
    reserve: set[str]

    def slice_digest(self, step: int) -> int: ...


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []


def check_max_norm(models: Sequence[nn.Module]) -> None:
    """Refuse what changes weights in forward by the samples of one worker, or of one pass."""
    for name, module in (named for model in models for named in model.named_modules()):
        if getattr(module, "max_norm", None) is not None and not hasattr(module.weight, "everstep_table"):
            raise ScriptError(
                f"max_norm of {name or 'the embedding'!r} changes the rows of one worker's (or one pass's) own samples "
                "in forward, and those of no other: build it without, and scale the rows down behind opt.step(): "
                "weight.copy_(torch.renorm(weight, 2, 0, max_norm)) under torch.no_grad()"
            )


class Gaps:
    """Watches the steps in which opt.step() was called. If one comes sooner than in all periods before, after an
    iteration was done again, the script counted that iteration twice."""

    def __init__(self) -> None:
        self._last = -1
        self._epoch = -1
        self._redone = 0
        self._gap = self._times = 0

    def add(self, number: int, stepped: bool, redone: int, epoch: int) -> str:
        """Return what is wrong with step ``number``; "": nothing."""
        if not stepped:
            return ""
        gap, last = number - self._last, self._last
        self._last = number
        again, self._redone = redone > self._redone, redone
        if last < 0 or epoch != self._epoch:
            self._epoch, self._gap, self._times = epoch, 0, 0
            return ""
        if gap == self._gap:
            self._times += 1
            return ""
        before, times = self._gap, self._times
        self._gap, self._times = gap, 1
        return f"{gap} steps after the one before, and not {before}," if again and times >= 3 and gap < before else ""


class GroupEngine:
    """See the top of this file. The public attributes are read by anyone; all else is the script's thread's."""

    sharded = False  # the models are, over the processes of this worker (FSDP2)

    def __init__(self, spec: JobSpec, slot: int, alone: bool) -> None:
        """Take ``alone``: embedded in a single process, which computes exactly what plain PyTorch does."""
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
        self.state: CopiedState | None = None
        self.tables: PlacedTables | None = None
        self.registered = 0  # loops begun
        self.unit = Unit(0, 1, [])  # the processes of this worker
        self._saved = SavedScript(self.inner, self.tracked)
        self._left: dict[int, tuple[int, int]] = {}  # by dataset: where the script left its last loop over it
        self.several = False  # iterations of several rounds were seen
        self._leaving_loop = False
        self._normed = False  # looked for in steps of several passes
        self._slice = 0  # digest of a slice of the state that the step in hand began with
        self._outside: Outside | None = None
        self._reducer: Reducer | None = None
        self._step: StepAttempt | None = None
        self._reader: PrefetchReader | None = None
        self._options = 0  # digest of the learning rates
        self._last = self._in_script = self._stepped = self._warming_up = False
        self._outcome: VoteOutcome | None = None
        self._unsure = False  # rounds of this iteration are reduced, and not voted on
        self._may = False  # optimizers may step
        self._nonfinite = False  # of such rounds
        self._digests: list[int] = []
        self._asks = False  # the script has called opt.step() in this iteration
        self._refrained = (-1, "")  # step in which an iteration that did not commit was without opt.step(), and why
        self._gaps = Gaps()
        self._samples = SampleCounts()
        self._loop_begin = -1  # step with which the script's loop began
        self._ran: set[bool] = set()  # whether the passes of this step before the last one called backward()
        self._scaler_checked = False
        self._replicated: set[int] = set()
        self._params: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._names: list[str] = []  # of ``_params``
        self._reserve: set[str] = set()
        self._reserved: set[str] = set()  # ``reserve``, as the reducer was made for it
        self._devices: set[torch.device] = set()  # that parameters are on
        self.in_hand = 0  # samples of the pass that the script is at, or raised in
        self.loader_batch = self._largest_batch = 0  # samples; of each process, by the script
        self._busy_s = self._wait_s = 0.0
        self.clock = StepClock()
        self.graph: Callable[[], GraphReading | None] = lambda: None  # readings of the model
        self._process = ProcessReadings()
        self._began_at = time.monotonic()
        self._rate: deque[tuple[float, int]] = deque([(self._began_at, 0)], maxlen=12)
        self._hook = register_optimizer_step_pre_hook(self._optimizer_steps)
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<GroupEngine step {self.step_number} {self._step} outcome={self._outcome}>"

    # ------------------------------------------------------------ Listener: what the master orders

    def placed(self, placement: Placement) -> None:
        """Take in a newer map of the ps."""
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
            "memory_batch": float(self._largest_batch * self.spread),
            **self.clock.readings(),
            **self._process.readings(),
        }
        step = self._step
        if step is not None:
            readings.update(accum=float(len(step.micros)), global_batch=float(step.total))
            readings["batch"] = float(max((m.hi - m.lo for m in step.micros), default=0))
        if "loss" in self.values:
            readings["loss"] = self.values["loss"]
        idle_s, inside = self.clock.idle_s, self.clock.inside
        return messages.Beat(
            readings=readings, values=dict(self.values), idle_s=idle_s, inside=inside, graph=self.graph()
        )

    # ------------------------------------------------------------ what the script gives

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> GroupOptimizer:
        wrapped = GroupOptimizer(optimizer, self)
        self.optimizers.append(wrapped)
        self.inner += [optimizer, *wrapped.nested]
        return wrapped

    @property
    def reserve(self) -> set[str]:
        """Return names of parameters that are reduced though they are frozen when an iteration begins: the script thaws
        them within it."""
        return self._reserve if self.state is None else self.state.reserve

    def place(self) -> tuple[int, int, int, int] | None:
        """Return, of the batch in hand, the loop of the script (from 1), dataset, epoch, and the samples of the step
        over which gradients are averaged. None: there is no batch."""
        step = self._step
        if step is None or not self._in_script:
            return None
        return self.registered, step.dataset, step.epoch, step.hi - step.lo

    @property
    def in_loop(self) -> bool:
        return self._in_script

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collect gradients only in the backward passes in here; the next one outside of it reduces them too."""
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
                if not hasattr(p, "everstep_table"):  # (rows of a table on the ps)
                    names.setdefault(id(p), (f"{i}.{name}" if len(self.models) > 1 else name, p))
        self._replicated = set(names)
        self._params = self._saved.params = [p for _, p in names.values()]
        self._trainable = [p.requires_grad for p in self._params]
        for optimizer in self.optimizers:
            self._check_optimizer(optimizer)
        if self.tables is not None:
            self.tables.check(self._has_scaler())
        self._check_devices()
        params = [(name, p) for name, p in names.values() if p.requires_grad or name in self.reserve]
        self._reserved = set(self.reserve)
        self._names = [name for name, _ in names.values()]
        if not params:
            raise ScriptError("no parameter of the model requires a gradient: there is nothing to train")
        if self._reducer is not None:
            if [id(p) for p in self._reducer.params] == [id(p) for _, p in params]:
                return
            self._reducer.close()
        trained, labels = [p for _, p in params], [n for n, _ in params]
        before = self._reducer
        if self.sharded and before is None:
            refuse_replaced(self.models, lambda: self._in_script)
        self._reducer = self._make_reducer(trained, labels)
        self._reducer.clock = self.clock
        self._reducer.sweeps = self.tables is None
        self._reducer.sums = not (self.spec.logical_workers or self.divided)
        if before is not None:
            self._reducer.follow(before)

    @property
    def divided(self) -> bool:
        """Return whether a process has a part of the models only."""
        return self.sharded

    @property
    def spread(self) -> int:
        """Return over how many processes the samples of a worker are spread."""
        return self.unit.size

    def _make_reducer(self, params: list[nn.Parameter], names: list[str]) -> Reducer:
        if self.sharded:
            return ShardedReducer(params, names, self.models, self._backward_over, self.unit)
        return Reducer(params, names, self.models, self.spec.logical_workers, self._backward_over)

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
                if id(p) not in self._replicated and not hasattr(p, "everstep_table"):
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
        """Yield this member's micro-batches of every step, until the group is through with the epochs."""
        session = self.session
        assert session is not None
        if self._in_script:
            raise ScriptError(
                "job.steps() inside the loop of another job.steps(): end the outer loop first, or read the second "
                "source beside the loop by other.read(epoch, lo, hi) of its loader"
            )
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
        first_epoch, self._loop_begin = until_epoch - loader.epochs, -1
        epoch, sample = self._left.pop(dataset, (first_epoch, 0))
        if epoch + (sample == plan.samples) < first_epoch:
            raise left_before(plan)
        self.loader_batch, self._largest_batch = loader.batch_size, largest
        looks = 0 if self.alone or self.divided else OUTSIDE_STEPS
        streams = None if self.alone and not self.spec.logical_workers else LoopStreams()
        reader = self._reader = PrefetchReader(loader.read, prefetch=not self.alone)
        enumerated = Enumerated(sys._getframe())
        draws = getattr(loader, "may_draw", False)
        if draws:
            STREAMS.take()
        try:
            if not self.alone:
                warm_up_step = session.warm_up_step(dataset, until_epoch, plan, loader.batch_size, largest)
                if warm_up_step is not None:
                    enumerated.set(sys._getframe(), warm_up_step.number)
                    yield from self._warm_up(session, warm_up_step, loader)
            self.clock.switch(stepclock.BARRIER)  # until there is a group, and it lets us in
            session.enter(dataset, until_epoch, plan, loader.batch_size, largest)
            for optimizer in self.optimizers:
                optimizer._share()  # a state that was copied into the inner ones may have replaced their groups
            if not self.divided:
                session.before_end = self._average_late
            while (step := self._next(session)) is not None:
                self._begin(step)
                assert self._reducer is not None
                at = self._step_of_loop(step, first_epoch, plan.samples)
                kept = self._keep_variables(sys._getframe(1), step)
                number = 0
                while number < len(step.micros):
                    micro = step.micros[number]
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
                    if looks and self._last:
                        self._outside = Outside(sys._getframe(1), self._known(), self._params)
                    self._samples.begin(sys._getframe(1) if kept is not None else None)
                    counts = enumerated.set(sys._getframe(), at)
                    yield batch
                    self._in_script, self.in_hand = False, 0
                    self._busy_s += time.perf_counter() - begin
                    self.batches += 1
                    if not self._last:
                        self._samples.end(sys._getframe(1), micro.hi - micro.lo, counts, self._asks)
                    number = 0 if self._repeat_passes() else number + 1
                    if number:
                        self._close(session, step)
                    if kept is not None and self._outcome is not VoteOutcome.COMMITTED:
                        kept.put_back()
                    if self._outside is not None:
                        looks -= 1
                        self._check_outside()
            self._show_late()
        except LeaveJob as leave:
            raise SystemExit(leave.status) from None
        finally:
            if streams is not None:
                streams.put_back()
            if draws:
                STREAMS.give()
            self.clock.switch(stepclock.OUTSIDE)
            reader.close()
            self._reader = None
            if self._in_script:
                self._break_off(session)
            if self.tables is not None:
                self.tables.release()
            if self._reducer is not None:
                self._reducer.close_micro()

    def _warm_up(self, session: GroupSession, step: StepAttempt, loader: Batches) -> Iterator[Any]:
        """Yield one iteration of the script whose outcome is thrown away, as that of a step which is done again: what
        is slow for the first time (memory, kernels, compilers, the loader) is not to be waited for by others."""
        left = False
        try:
            self._begin(step, warm_up_step=True)
            micro = step.micros[0]
            batch = loader.read(step.epoch, micro.lo, micro.hi)
            self._open(step, micro, True)
            self._in_script = self._warming_up = True
            self.in_hand = micro.hi - micro.lo
            yield batch
            self.in_hand = 0
        except GeneratorExit:
            left = True
            raise
        finally:
            self._in_script = self._warming_up = False
            if self._reducer is not None:
                if self._outcome is None:
                    self._saved.save_large()
                self._reducer.close_micro()
                self._reducer.buffers.restore()
                self._reducer.put_back()
            self._saved.restore()
            self._step = None
            session.warmed_up()
            if left:
                session.left_warm_up()

    def _next(self, session: GroupSession) -> StepAttempt | None:
        self.clock.switch(stepclock.BARRIER)
        return session.begin()

    def _begin(self, step: StepAttempt, warm_up_step: bool = False) -> None:
        assert self._reducer is not None
        if [p.requires_grad for p in self._params] != self._trainable or self.reserve != self._reserved:
            self._prepare()  # the script froze or thawed some
        self._step = step
        self.step_number = step.number
        if len(step.micros) > 1 and not self._normed:
            check_max_norm(self.models)
            self._normed = True
        plain = self.alone and not self.spec.logical_workers
        self._saved.save(several=warm_up_step or len(step.micros) > 1, watch=not plain)
        self._slice = 0 if step.size == 1 or self.state is None else self.state.slice_digest(step.number)
        self._reducer.several = self.several
        self._reducer.begin_step(step)
        self._ran.clear()
        self._digests.clear()
        self._nonfinite = False

    def _open(self, step: StepAttempt, micro: Micro, last: bool) -> None:
        assert self._reducer is not None
        self._last, self._outcome, self._stepped = last, None, False
        self._unsure = self._may = self._asks = False
        if self.spec.logical_workers:
            seed_streams(part_seed(self.spec.seed, step.number, micro.part))
        elif not self.alone:  # e.g. for dropout
            seed_range(self.spec.seed, step.epoch, micro.lo, step.dataset)
        self._reducer.begin_micro(micro, last)

    def _read(self, reader: PrefetchReader, step: StepAttempt, number: int, plan: ShardSchedule) -> Any:
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

    def _close(self, session: GroupSession, step: StepAttempt) -> None:
        """The script's iteration is over."""
        reducer = self._reducer
        assert reducer is not None
        if self.failure is not None:
            raise self.failure
        if not self._last:
            self._saved.save_large()
            self._refrain("one of the passes in which its batch is computed")
            self._ran.add(reducer.backwards > 0)
            reducer.end_micro()
            self._saved.restore()
            if self.tables is not None:
                self.tables.collect(reducer.weight)
                self.tables.release()
                self.tables.put_back()
            return
        if self._outcome is None and not self._unsure:
            self._round()
        if self._unsure:
            self._vote_at_end(step)
        elif self._outcome is VoteOutcome.COMMITTED and reducer.rounds:
            self._end_extension(step)
        reducer.close_micro()
        if self.tables is not None:
            self.tables.release()
        if self._outcome is VoteOutcome.COMMITTED:
            self._check_refrained(step)
            if reducer.plain:
                reducer.buffers.keep()
            else:
                reducer.buffers.settle()
            reducer.buffers.discard_undo()
            self._saved.discard_undo()
            reducer.stepped = self._stepped
            carried = reducer.carries
        else:
            if self._outcome is VoteOutcome.REDO:
                self._refrain("an attempt that was lost with a worker")
            reducer.buffers.roll_back()
            reducer.put_back()
            self._saved.restore()
            if self.tables is not None:
                self.tables.put_back()
            carried = any(p.grad is not None for p in reducer.params)
        if self._outcome is VoteOutcome.REDO:
            self.redone += 1
            return
        if self._outcome is VoteOutcome.SKIPPED:
            self.skipped += 1
        self.samples += sum(m.hi - m.lo for m in step.micros)
        self.step_number = step.number + 1
        if self.state is not None:
            self.state.carried = carried
        if self.tables is not None:
            self.tables.hold_step()
        session.done(step, self._stepped, left=self._leaving_loop)
        if self.tables is not None and not self.tables.close_step(step):
            session.broken(step)

    def _step_of_loop(self, step: StepAttempt, first_epoch: int, samples: int) -> int:
        """Return the number of ``step`` from the begin of the script's loop, the same on all workers."""
        if self._loop_begin < 0:
            if self.registered <= 1:
                self._loop_begin = 0
            else:  # a worker that joined in a later loop: the steps before it were as large
                total = step.total if step.hi < samples else self.loader_batch * self.spread * step.size
                before = (step.epoch - first_epoch) * -(-samples // total) + -(-step.lo // total)
                self._loop_begin = step.number - before
        return step.number - self._loop_begin

    def _keep_variables(self, frame: Any, step: StepAttempt) -> Outside | None:
        """Return where a step has several passes: tensors of the script that are like parameters (averages, slow
        weights), as they are before an iteration, so that what follows the step counts once."""
        if len(step.micros) == 1:
            return None
        return Outside(frame, self._known(), self._params, single=True)

    def _repeat_passes(self) -> bool:
        """Whether the step's passes begin once more behind this iteration: the gradient of one more round is known."""
        reducer = self._reducer
        assert reducer is not None
        if not reducer.anew or self.failure is not None:
            return False
        self.several = reducer.several = True
        self._saved.save_large()
        reducer.repeat_passes()
        self._saved.restore()
        self._ran.clear()
        return True

    def _known(self) -> list[torch.Tensor]:
        """Return the tensors that the job keeps."""
        found: list[Any] = [p.grad for p in self._params]
        found += [b for model in self.models for b in model.buffers()]
        for values in (*self.inner, *self.tracked.values()):
            found += _tensors(values.state_dict())
        return [t for t in found if isinstance(t, torch.Tensor)]

    def _check_outside(self) -> None:
        """After an iteration: does the script keep an average of the model that the job does not know?"""
        outside, self._outside = self._outside, None
        name = outside.moved() if outside is not None and self._outcome is VoteOutcome.COMMITTED else ""
        if name:
            raise ScriptError(
                f"{name} in the script is an average or a copy of a parameter that changes in the loop, and the job "
                "does not know it: a worker that joins would not have it, and an iteration that is done again would "
                "change it twice. Keep it in a module (copy.deepcopy(model)) and call job.replicate(module), or in an "
                "object with state_dict and load_state_dict and call job.track(name=object), before job.steps()"
            )

    def _refrain(self, why: str) -> None:
        """End an iteration that does not commit. The script sees zeros for gradients in it, so that it refrains from
        opt.step() only by a count or by something else that this iteration has of its own."""
        assert self._step is not None
        if not self._asks:
            self._refrained = (self._step.number, why)

    def _check_refrained(self, step: StepAttempt) -> None:
        number, why = self._refrained
        shortened = self._gaps.add(step.number, self._stepped, self.redone, step.epoch)
        if self._ran and self._reducer is not None and self._ran != {self._reducer.backwards > 0}:
            raise ScriptError(
                f"step {step.number}: backward() was called in some of the {self._reducer.passes} passes in which its "
                "batch is computed, and not in others: skip by what is the same in all passes and on all workers "
                "(job.step), not by a counter of the script's own or by the loss of a pass"
            )
        early = self._samples.ended_early()
        if early and not self._asks:
            raise ScriptError(
                f"step {step.number}: {early.partition(' ')[2]!r}, which counts samples, led to opt.step() in a pass "
                "before the step's last one, whose gradient is not whole: count steps, with job.step or enumerate"
            )
        if not self._stepped or self._has_scaler() or self._samples.trusted:
            return
        if number == step.number:
            raise ScriptError(
                f"step {step.number}: opt.step() was called in its last iteration and not in {why}: count with "
                "job.step, which counts steps, or by enumerate(job.steps(...)), and not with a counter of the script's "
                "own, which counts iterations"
            )
        if shortened:
            raise ScriptError(
                f"step {step.number}: opt.step() was called {shortened} since an iteration was done again: count with "
                "job.step, which counts steps, or by enumerate(job.steps(...)), and not with a counter of the script's "
                "own, which counts iterations"
            )

    def _break_off(self, session: GroupSession) -> None:
        """The script left the loop inside an iteration: what is committed is done, all else is as before the step."""
        self._in_script = False
        reducer, step = self._reducer, self._step
        if reducer is None or step is None or self.failure is not None:
            return
        pending = self._unsure and (self._stepped or not self.several)
        if self._last and (pending or self._outcome in (VoteOutcome.COMMITTED, VoteOutcome.SKIPPED)):
            self._leaving_loop = True
            try:
                self._close(session, step)
            finally:
                self._leaving_loop = False
            reducer.buffers.show_late()
            self._left[step.dataset] = step.epoch, step.hi
            return
        self._left[step.dataset] = step.epoch, step.lo
        reducer.buffers.roll_back()
        reducer.put_back()
        self._saved.restore()
        if self.tables is not None:
            self.tables.voted(step, VoteOutcome.REDO)

    # ------------------------------------------------------------ the vote

    def _backward_over(self) -> None:
        reducer = self._reducer
        assert reducer is not None
        if reducer.replays:
            self._replay()
        elif self._last:
            self._round()
        elif self._asks and not reducer.ordered:
            reducer.order(f"opt.step() {'before' if reducer.backwards == 1 else 'between two'} backward()")
        else:
            self._collect()

    def _collect(self) -> None:
        """In a pass before the last: what its backward gave is part of the step."""
        reducer = self._reducer
        assert reducer is not None
        self._saved.save_large()
        if self.tables is not None:
            self.tables.collect(reducer.weight)  # (the script may zero it)
        reducer.hide()
        if reducer.ordered:
            self._may, reducer.dead = False, True

    def _replay(self) -> None:
        """Go on, at the end of a round, with its gradient, which is known from a sweep before."""
        assert self._reducer is not None
        self._saved.save_large(states=True)
        self._reducer.replay()
        self._may = not self._nonfinite

    def _round(self) -> None:
        """Reduce what is left, and put the gradients where the script expects them. The vote follows at once; or at the
        iteration's end, where somebody has seen iterations of several rounds."""
        reducer, step, session = self._reducer, self._step, self.session
        assert reducer is not None
        assert step is not None
        assert session is not None
        if self._warming_up:
            if not self.spec.logical_workers:  # (of which there is one part)
                reducer.finish()
            self._outcome = VoteOutcome.REDO
            self._saved.save_large()
            reducer.place(False)
            return
        wait_for(self._devices)  # kernels of backward are this member's own time, not the group's
        if not reducer.rounds:
            self.clock.computed(sum(m.hi - m.lo for m in step.micros))
            self._saved.look()
        else:
            self.several = True
        self.clock.switch(stepclock.BARRIER)
        begin = time.perf_counter()
        thawed = self._thawed()
        reduced = reducer.finish(self._meanwhile)
        if reduced is not None and self.tables is not None:
            reduced = self._with_tables(reduced, step)
        if reducer.rounds and self._outcome is VoteOutcome.COMMITTED:
            self._extend(reduced, step)
        elif reduced is None:
            session.broken(step)
            self._outcome, self._unsure = VoteOutcome.REDO, False
        elif thawed and not (self.alone and reducer.plain):
            self._outcome, self._unsure = VoteOutcome.REDO, False  # (here as on all workers)
        else:
            nonfinite = not reduced.finite and not self._has_scaler()
            if nonfinite and self.spec.nonfinite == "raise":
                raise self._nonfinite_error(step)
            self._digests.append(0 if not reduced.finite else join_digests([reduced.digest, self._options]))
            self._nonfinite = self._nonfinite or nonfinite
            if self._unsure or self.several or reducer.at_end or (self.alone and reducer.plain):
                self._unsure = True
            else:
                self._outcome = session.vote(step, self._digests[0], nonfinite, self._slice)
        if self.tables is not None and self._outcome is not None:
            self.tables.voted(step, self._outcome)
        if reducer.ordered and reducer.passes > 1 and self._unsure:
            reducer.remember()
        self._place(step)
        self._wait_s += time.perf_counter() - begin
        self.clock.switch(stepclock.UPDATE)

    def _thawed(self) -> bool:
        """Whether the script has thawed parameters in this iteration that are not reduced yet: it is done again."""
        found = {
            name
            for name, p, was in zip(self._names, self._params, self._trainable, strict=True)
            if p.requires_grad and not was and name not in self._reserved
        }
        self.reserve.update(found)
        return bool(found)

    def _place(self, step: StepAttempt) -> None:
        """The script's code behind backward is next."""
        reducer = self._reducer
        assert reducer is not None
        undo = self._unsure and not (self.alone and reducer.plain and self.spec.nonfinite == "raise")
        self._may = self._outcome is VoteOutcome.COMMITTED or (self._unsure and not self._nonfinite)
        if undo:
            self._saved.save_large(states=True)
            reducer.buffers.begin_unsure()
        if self._may:
            reducer.commit_buffers()
        else:
            self._saved.save_large()
        reducer.place(self._may, final=not undo)

    def _vote_at_end(self, step: StepAttempt) -> None:
        """The iteration is over, and its rounds are not voted on yet."""
        reducer, session = self._reducer, self.session
        assert reducer is not None
        assert session is not None
        self.clock.switch(stepclock.BARRIER)
        begin = time.perf_counter()
        self._unsure = False
        if reducer.end_rounds(step, self._leaving_loop):
            self._outcome = session.vote(step, join_digests(self._digests), self._nonfinite, self._slice)
        else:
            session.broken(step)
            self._outcome = VoteOutcome.REDO
        if self.tables is not None:
            self.tables.voted(step, self._outcome)
        self._wait_s += time.perf_counter() - begin

    def _extend(self, reduced: ReducedStep | None, step: StepAttempt) -> None:
        """Begin a further round of a step that is committed: the first time that an iteration has several."""
        if reduced is None:
            raise self._torn(step)
        if not reduced.finite and not self._has_scaler():
            raise self._nonfinite_error(step)

    def _end_extension(self, step: StepAttempt) -> None:
        assert self._reducer is not None
        if not self._reducer.end_rounds(step, self._leaving_loop):
            raise self._torn(step)

    def _torn(self, step: StepAttempt) -> EverstepError:
        error = PlatformError(
            f"a worker was lost in step {step.number}, the first whose iteration called backward() more than once, and "
            "what it did before that is committed: start again, or everstep resume from a checkpoint"
        )
        self.failure = self.failure or error
        return error

    def _average_late(self, collective: Collective) -> None:
        """All members are at the end of the loop: what changed in buffers behind the last vote counts too."""
        reducer = self._reducer
        if reducer is None:
            return
        late = reducer.buffers.late
        late_at = [bool(row[0]) for row in collective.gather([late])]
        if any(late_at):
            tail = torch.zeros(reducer.buffers.tail)
            reducer.buffers.collect_late(tail, 1 / sum(late_at), late_at.index(True) == collective.rank)
            if collective.size > 1:
                collective.allreduce(tail).wait()
            reducer.buffers.commit(tail)

    def _show_late(self) -> None:
        if self._reducer is not None:
            self._reducer.buffers.show_late()

    def reduce_gradients(self) -> None:
        """See ``Job.reduce_gradients``."""
        if not self._in_script or self._reducer is None:
            raise ScriptError("job.reduce_gradients() outside of job.steps()")
        self._reducer.take_assigned()

    def _meanwhile(self) -> None:
        """Use the time while gradients are reduced: this thread has nothing else to do."""
        self._options = self._options_digest()
        if self._reader is not None:
            self._reader.fill()

    def _with_tables(self, reduced: ReducedStep, step: StepAttempt) -> ReducedStep | None:
        """Send the gradients of the tables' rows along with those of the parameters."""
        assert self.tables is not None
        assert self._reducer is not None
        self.tables.collect(self._reducer.weight)
        exchanged = self.tables.exchange(step)
        if exchanged is None:
            return None
        digest, finite = exchanged
        return ReducedStep(join_digests([reduced.digest, digest]), reduced.finite and finite)

    def _options_digest(self) -> int:
        """Return a digest of the learning rates: workers whose rates differ would drift apart unseen."""
        lrs = [float(g.get("lr", 0.0)) for o in self.inner for g in o.param_groups]
        return zlib.crc32(struct.pack(f"{len(lrs)}d", *lrs))

    def _has_scaler(self) -> bool:
        """Return whether a GradScaler looks after gradients that are not finite."""
        return any(hasattr(t, "get_scale") and t.is_enabled() for t in self.tracked.values())

    def loss_scale(self) -> float:
        """Return the factor by which gradients are multiplied until their step."""
        scalers = [t for t in self.tracked.values() if hasattr(t, "get_scale") and t.is_enabled()]
        return float(scalers[0].get_scale()) if scalers else 1.0

    def _nonfinite_error(self, step: StepAttempt) -> NonFiniteGradientError:
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
        if not self._in_script:
            return self._step_behind_loop(optimizer)
        assert self._reducer is not None
        assert self._step is not None
        if not self._scaler_checked:
            self._scaler_checked = True
            self._check_scaler(caller)
        self._asks = True
        if self._outcome is None and not self._unsure:
            self._check_assigned()
        reducer = self._reducer
        if reducer.ordered and not (
            reducer.rounds or reducer.ended or reducer.dead
        ):  # a first round that this call ends
            if reducer.replays:
                self._replay()
            elif not self._last:
                reducer.end_early()
                self._collect()
        if self._last and self._outcome is None and not self._unsure and not self._may:
            self._round()
        if not self._may or self._reducer.anew:
            return None
        if self.tables is not None:
            self.tables.stepped(optimizer, self._step.lr_factor)
        return self._step.lr_factor

    def _step_behind_loop(self, optimizer: GroupOptimizer) -> float | None:
        """Use the rest of an accumulation. Reduced gradients that no optimizer has used are part of the state: all
        members that trained the loop to its end have the same, and step alike, as they do with all that stands between
        loops; so have those that copied the state at its end, without a step of their own.
        """
        if self._reducer is None or self.session is None or not self.registered:
            raise ScriptError("opt.step() before job.steps(): no gradient is there yet; step in the loop, or behind it")
        where = self.session.behind_loop()
        if where.passing:
            return None
        factor = self._step.lr_factor if self._step is not None else where.lr_factor
        if self.tables is not None:
            self.tables.stepped_behind(optimizer, factor, where.last)
        return factor

    def _check_assigned(self) -> None:
        assert self._reducer is not None
        name = self._reducer.assigned()
        if name and self.alone and self._reducer.plain:
            self._reducer.take_assigned()
        elif name:
            raise ScriptError(
                f"the gradient of {name!r} was not made by backward() but assigned (torch.autograd.grad, torch.func): "
                "it is of this worker's samples only; call job.reduce_gradients() after assigning, before clipping and "
                "opt.step()"
            )

    def zeroed(self, optimizer: GroupOptimizer) -> None:
        """Do ``zero_grad``: tables that follow the only optimizer are zeroed with it."""
        if self.tables is not None:
            self.tables.zeroed(optimizer)

    def has_stepped(self, optimizer: GroupOptimizer) -> None:
        self._stepped = True
        if self.tables is not None:
            self.tables.has_stepped()
        if self._reducer is not None:
            self._reducer.used_by({id(p) for g in optimizer.param_groups for p in g["params"]})

    def check_group(self, param_group: dict[str, Any]) -> None:
        if not self._in_script:
            return  # ``steps`` looks at all of them
        given = param_group["params"]
        given = param_group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        for p in given:
            if id(p) not in self._replicated and not hasattr(p, "everstep_table"):
                raise ScriptError(
                    f"opt.add_param_group in the loop: a parameter of shape {tuple(p.shape)} that no model had when "
                    "job.steps() began: nobody else would have it; build it before, with requires_grad_(False)"
                )

    def check_state(self, optimizer: GroupOptimizer) -> None:
        if self.tables is not None:
            self.tables.check_state(optimizer)

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
        """Prepare before any optimizer of this process steps."""
        if not self._in_script or isinstance(optimizer, GroupOptimizer) or threading.get_ident() != self._thread:
            return
        if any(optimizer is inner for inner in self.inner):
            if self._may:
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
                self.clock.switch(stepclock.BARRIER)  # (it may wait for the chief)
                self.session.close(error)
        finally:
            if self.tables is not None:
                self.tables.close()
