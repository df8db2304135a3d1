"""Groups for tests: real processes, real gloo, a session without master. ``run_group(n, script)`` forks n members."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # optimizers import it on first use: once, here, not in every member
from torch.distributed import ProcessGroupGloo

from everstep.allreduce.collective import Alone
from everstep.allreduce.group_engine import GroupEngine
from everstep.allreduce.step import LeaveJob, StepAttempt, VoteOutcome
from everstep.config.spec import JobSpec
from everstep.model.group import Group, Position, StepSplit
from everstep.model.shard import ShardSchedule
from everstep.policies.step_split import cut_step

WAIT = timedelta(seconds=40)


class GlooWork:
    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, timeout_s: float | None = None) -> None:
        self.work.wait(WAIT)


class Gloo:
    """A collective over torch's own gloo group."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.rank, self.size = rank, size
        self.host_sums = True
        self.fail_next = False
        if size > 1:
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = WAIT
            self.group = ProcessGroupGloo(torch.distributed.FileStore(str(store), size), rank, size, options)

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> GlooWork:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX if op == "max" else torch.distributed.ReduceOp.SUM
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("broken by the test")
        return GlooWork(self.group.allreduce([tensor], options))

    def send(self, tensor: torch.Tensor, peer: int) -> GlooWork:
        return GlooWork(self.group.send([tensor], peer, 0))

    def recv(self, tensor: torch.Tensor, peer: int) -> GlooWork:
        return GlooWork(self.group.recv([tensor], peer, 0))

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(list(values), dtype=torch.int64)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        self.group.allgather([out], [mine]).wait(WAIT)
        return [t.tolist() for t in out]

    def abort(self) -> None: ...

    def close(self) -> None: ...


class ScriptedSession:
    """A group that never changes. ``redo``: steps whose first attempt is voted down."""

    def __init__(self, spec: JobSpec, collective: Gloo, redo: frozenset[int] = frozenset()) -> None:
        self.spec, self.collective = spec, collective
        self.position = Position()
        self.split = StepSplit()
        self.before_end: Callable[[Any], None] | None = None
        self.redo = set(redo)
        self.break_at: set[int] = set()
        self.log: list[tuple[int, int, int, str]] = []
        self.leave_at = -1
        self._outcome = VoteOutcome.REDO
        self.warm_up = self.warming_up = False
        self.left_warm_ups = 0
        self.left: list[int] = []  # steps in which the script left the loop

    def warm_up_step(
        self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0
    ) -> StepAttempt | None:
        self.warming_up, self.warm_up = self.warm_up, False
        cut = cut_step(self.position, plan, until_epoch, batch_samples, self.spec, 1) if self.warming_up else None
        return cut and StepAttempt.of(
            msgspec.structs.replace(cut, micros=(cut.micros[0][:1],)), self.position, 1, 0, Alone()
        )

    def warmed_up(self) -> None:
        assert self.warming_up
        self.warming_up = False

    def left_warm_up(self) -> None:
        assert not self.warming_up
        self.left_warm_ups += 1

    def enter(self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0) -> None:
        self.dataset, self.until, self.plan, self.batch = dataset, until_epoch, plan, batch_samples

    def begin(self) -> StepAttempt | None:
        if self.position.step == self.leave_at:
            raise LeaveJob(143)
        c = self.collective
        cut = cut_step(self.position, self.plan, self.until, self.batch, self.spec, c.size, self.split)
        if cut is None:
            if self.before_end is not None:
                self.before_end(c)
            return None
        if self.position.step in self.break_at:
            self.break_at.discard(self.position.step)
            c.fail_next = True
        return StepAttempt.of(cut, self.position, 1, c.rank, c)

    def vote(self, step: StepAttempt, digest: int, nonfinite: bool, state: int = 0) -> VoteOutcome:
        if step.size > 1:
            said = torch.tensor([digest, -digest])
            self.collective.allreduce(said, "max").wait()
            assert said[0] == -said[1], f"members disagree in step {step.number}"
        if step.number in self.redo:
            self.redo.discard(step.number)
            return VoteOutcome.REDO
        self._outcome = VoteOutcome.SKIPPED if nonfinite else VoteOutcome.COMMITTED
        return self._outcome

    def broken(self, step: StepAttempt) -> None:
        self.log.append((step.number, step.lo, step.hi, "broken"))
        assert len(self.log) < 1000, "breaks again and again"

    def done(self, step: StepAttempt, stepped: bool = True, left: bool = False) -> None:
        self.left += [step.number] if left else []
        self.log.append((step.number, step.lo, step.hi, self._outcome.value))
        self.position = Position(step.number + 1, step.dataset, step.epoch, step.hi)

    def grouped(self, group: Group) -> None: ...

    def welcomed(self) -> None: ...

    def leave_soon(self, status: int) -> bool:
        self.leave_at = self.position.step + 1
        return True

    def fail(self, error: Exception) -> None: ...

    def finish(self) -> None: ...

    def close(self, error: str = "") -> None: ...


class ListLoader:
    """``data``: tensors whose first dimension are the samples; no shuffling."""

    def __init__(self, data: dict[str, torch.Tensor], batch_size: int, epochs: int = 1) -> None:
        self.data, self.batch_size, self.epochs = data, batch_size, epochs
        self.largest_batch = 0

    def plan(self) -> ShardSchedule:
        n = len(next(iter(self.data.values())))
        return ShardSchedule(name="train", samples=n, shard_samples=n, seed=0)

    def read(self, epoch: int, lo: int, hi: int) -> dict[str, torch.Tensor]:
        return {name: values[lo:hi] for name, values in self.data.items()}


class Member:
    """What a test's script gets: the engine with the few calls of a Job."""

    def __init__(
        self, spec: JobSpec, collective: Gloo, redo: frozenset[int] = frozenset(), alone: bool | None = None
    ) -> None:
        """``alone``: embedded in a single process, where no step is redone (one member: so)."""
        self.engine = GroupEngine(spec, collective.rank, alone=collective.size == 1 if alone is None else alone)
        self.session = ScriptedSession(spec, collective, redo)
        self.engine.session = self.session
        self.rank, self.size = collective.rank, collective.size

    def replicate(self, model: Any) -> Any:
        self.engine.models.append(model)
        return model

    def optimizer(self, inner: torch.optim.Optimizer) -> Any:
        return self.engine.add_optimizer(inner)

    def track(self, **objects: Any) -> None:
        self.engine.tracked.update(objects)

    def steps(self, loader: ListLoader) -> Iterator[Any]:
        return self.engine.steps(loader, 0, loader.epochs)


def alone(spec: JobSpec, script: Callable[[Member], Any]) -> Any:
    """``script`` alone, embedded in this process."""
    return _here(spec, script, frozenset(), True)


def group_of_one(spec: JobSpec, script: Callable[[Member], Any], redo: frozenset[int] = frozenset()) -> Any:
    """``script`` in this process, as the last member that is left of a group."""
    return _here(spec, script, redo, False)


def _here(spec: JobSpec, script: Callable[[Member], Any], redo: frozenset[int], alone: bool) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    member = Member(spec, Gloo(0, 1, Path()), redo, alone)
    try:
        return script(member)
    finally:
        member.engine.close()


def run_group(n: int, spec: JobSpec, script: Callable[[Member], Any], redo: frozenset[int] = frozenset()) -> list[Any]:
    """``script(member)`` in n forked processes; their results by rank. AssertionError with the tracebacks of members
    that failed."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, n, spec, script, redo, Path(folder)) for rank in range(n)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        outs = [Path(folder) / f"{rank}.out" for rank in range(n)]
        results = [
            pickle.loads(o.read_bytes()) if o.exists() else (False, _stuck(o, end))
            for o, end in zip(outs, ends, strict=True)
        ]
    bad = [text for ok, text in results if not ok]
    assert not bad, "\n".join(bad)
    return [value for _, value in results]


def _stuck(out: Path, end: int) -> str:
    """Where a member was that left no result. ``end``: its exit status, negative for a signal."""
    stack = out.with_suffix(".stack")
    return f"{out.stem} left no result, ended with {end}:\n{stack.read_text() if stack.exists() else 'no stack'}"


def _fork(rank: int, n: int, spec: JobSpec, script: Any, redo: frozenset[int], folder: Path) -> int:
    stack = (folder / f"{rank}.stack").open("w")
    # What the tests before have left belongs to the parent: a finalizer that joins one of its threads would wait in the
    # child for ever.
    gc.disable()
    pid = os.fork()
    if pid:
        gc.enable()
        stack.close()
        return pid
    status = 1
    try:
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * int(WAIT.total_seconds()))  # nothing hangs for ever
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(1.5 * WAIT.total_seconds(), file=stack)
        _member(rank, n, spec, script, redo, folder)
        status = 0
    except BaseException:
        stack.write(traceback.format_exc())
        stack.flush()
    finally:
        os._exit(status)  # nothing of the parent's runs here, least of all what removes the folder


def _member(rank: int, n: int, spec: JobSpec, script: Any, redo: frozenset[int], folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        torch.manual_seed(spec.seed)
        member = Member(spec, Gloo(rank, n, folder / "store"), redo)
        out = (True, script(member))
    except BaseException:
        out = (False, f"rank {rank}:\n{traceback.format_exc()}")
    (folder / f"{rank}.out").write_bytes(pickle.dumps(out))
    # Who ends at once may cut off what the others have not read yet.
    until = time.monotonic() + WAIT.total_seconds()
    while time.monotonic() < until and not all((folder / f"{r}.out").exists() for r in range(n)):
        time.sleep(0.002)
