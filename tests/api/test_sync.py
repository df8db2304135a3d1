"""Consistency sync: a step of several workers is one step of one process on all their samples, however they are cut."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import everstep as es
from everstep.api.embedded import EmbeddedRuntime
from everstep.api.job import Job
from everstep.brain import events
from everstep.brain.policy_control import divide
from everstep.brain.schedule_controller import ScheduleController
from everstep.brain.watch import HeartbeatWatch
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Role
from everstep.model.plan import AdjustAccum, AdjustBatch
from everstep.model.shard import split_key
from everstep.model.step_schedule import StepSchedule
from everstep.model.table import OptimizerSpec
from everstep.monitor.audit import audit
from everstep.net import messages
from everstep.net.arena import Arena
from everstep.tables.client import PsClient
from everstep.tables.worker_protocol import WorkerProtocol

ONE, HERE = Incarnation(1), NodeId("node0")
N, EPOCHS = 48, 4
# Of the rows of tables, and of the dense part.
OPTIMIZERS: dict[str, tuple[OptimizerSpec, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (es.SGD(lr=0.5), lambda p: torch.optim.SGD(p, 0.5)),
    "momentum": (es.SGD(0.1, 0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1)),
    "adagrad": (es.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    "rowwise": (es.RowWiseAdagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    "adam": (es.Adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
}


class OneOfTwo(EmbeddedRuntime):
    """A worker of a job of two, in one process. Orders come on a thread of their own, as they do from a real master."""

    def __init__(self, spec: JobSpec, run_dir: Path, first: OneOfTwo | None) -> None:
        if first is None:
            super().__init__(spec, run_dir)
            self.controller = ScheduleController(self.master.brain, HeartbeatWatch(spec), spec, ONE, self._order)
            self.runtimes: dict[Slot, OneOfTwo] = {}
        else:
            self.__dict__.update({**first.__dict__, "slot": Slot(1)})
            self.arena = Arena(64 << 20)
            self.client = PsClient(self.arena)
        self.runtimes[self.slot] = self
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def _order(self, slot: Slot, schedule: StepSchedule) -> None:
        if slot in self.runtimes:
            self.runtimes[slot].orders.put(schedule)

    def _deliver(self) -> None:
        while (schedule := self.orders.get()) is not None:
            listener: Any = self._listener
            listener.scheduled(schedule)

    def start(self, listener: Any) -> None:
        if self.slot == 0:
            super().start(listener)
            return
        self._listener = listener
        answer = self.master.dispatch(events.MemberJoined(Role.WORKER, self.slot, ONE, HERE, 1), self._me)
        assert isinstance(answer, events.Welcome) and answer.placement is not None
        self._placed(answer.placement)

    def call(self, request: Any, timeout_s: float) -> Any:
        if isinstance(request, messages.ClockReported):
            with self.master._lock:
                self.controller.report(self.slot, ONE, request.clock)
            return events.Ok()
        answer = super().call(request, timeout_s)
        with self.master._lock:
            self.controller.handled()
        return answer

    def close(self, error: str) -> None:
        """The last worker to leave takes the job with it."""
        self.orders.put(None)
        del self.runtimes[self.slot]
        if not self.runtimes:
            super().close(error)
            return
        self.master.tell(events.ProcessExited(Role.WORKER, self.slot, ONE, 0, error))
        self._let_go()


def data() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 20, (N, 2))
    return {"ids": ids, "x": rng.normal(size=(N, 3)).astype(np.float32), "y": rng.normal(size=N).astype(np.float32)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.bag = nn.EmbeddingBag(20, 4, mode="sum")
        self.top = nn.Linear(7, 1)

    def forward(self, b: Any) -> Any:
        return self.top(torch.cat([self.bag(b["ids"]), b["x"]], 1)).squeeze(1)


def plain(optimizer: str) -> dict[str, torch.Tensor]:
    """Full batches in plain PyTorch."""
    model, d = Net(), {k: torch.from_numpy(v) for k, v in data().items()}
    by_hand = optimizer == "rowwise"
    opt = OPTIMIZERS[optimizer][1](model.top.parameters() if by_hand else model.parameters())
    seen = torch.zeros(20, 1)
    for _ in range(EPOCHS):
        model.zero_grad()
        ((model(d) - d["y"]) ** 2).mean().backward()
        opt.step()
        if by_hand:  # torch has none: one accumulator a row, of the mean of squares
            grad = model.bag.weight.grad
            assert grad is not None
            seen += (grad**2).mean(1, keepdim=True)
            model.bag.weight.data -= 0.1 * grad / (seen.sqrt() + 1e-10)
    return model.state_dict()


@pytest.mark.parametrize(("cut", "optimizer"), [(24, "sgd"), (36, "momentum"), (41, "adam")])
def test_any_split_of_a_step_trains_what_one_process_does(tmp_path: Path, cut: int, optimizer: str) -> None:
    """Each epoch is one step: shards of ``cut`` samples and of the rest, one of them for each worker."""
    batches = train(tmp_path, cut, N, {}, {}, optimizer)
    assert sum(map(len, batches)) == 2 * EPOCHS


@pytest.mark.parametrize(
    ("shares", "passes", "cut", "sizes", "optimizer"),
    [
        ((24, 24), {}, 12, ([12, 12], [12, 12]), "rowwise"),
        ((36, 12), {}, 12, ([12, 12, 12], [12]), "adagrad"),
        ((40, 8), {0: 10}, 8, ([4] * 10, [8]), "adagrad"),
        ((40, 8), {0: 10}, 8, ([4] * 10, [8]), "adam"),
    ],
)
def test_a_plan_divides_steps_and_trains_what_even_shares_train(
    tmp_path: Path,
    shares: tuple[int, int],
    passes: dict[int, int],
    cut: int,
    sizes: tuple[list[int], list[int]],
    optimizer: str,
) -> None:
    """ADJUST_BS, ADJUST_ACCUM: a part is of several shards and passes, and each epoch is still one step."""
    batches = train(tmp_path, cut, 24, dict(enumerate(shares)), passes, optimizer)
    assert batches == [sizes[0] * EPOCHS, sizes[1] * EPOCHS]


@pytest.mark.parametrize(
    ("shares", "passes", "sizes"),
    [((), {}, ([8, 8, 8], [24])), ((24, 24), {0: 2, 1: 1}, ([8, 8, 8], [24]))],
)
def test_a_batch_that_does_not_fit_into_a_worker_is_computed_in_several_passes(
    tmp_path: Path, shares: tuple[int, ...], passes: dict[int, int], sizes: tuple[list[int], list[int]]
) -> None:
    """Without a plan, and with one that was made when nobody knew."""
    batches = train(tmp_path, 24, 24, dict(enumerate(shares)), passes, "adagrad", {0: 10})
    assert batches == [sizes[0] * EPOCHS, sizes[1] * EPOCHS]


def train(
    tmp_path: Path,
    cut: int,
    batch: int,
    shares: dict[int, int],
    passes: dict[int, int],
    optimizer: str,
    fits: dict[int, int] | None = None,
) -> list[list[int]]:
    """Train with two workers, in shards of ``cut`` samples, and compare with ``plain``. Sizes of each one's batches.
    ``fits``: their ``largest_batch``."""
    spec = JobSpec(workers=2, ps=1, consistency="sync", partitions=8)
    first = OneOfTwo(spec, tmp_path, None)
    actions = (
        AdjustBatch(batch={Slot(s): n for s, n in shares.items()}),
        AdjustAccum(accum={Slot(s): n for s, n in passes.items()}),
    )
    divide(first.master.brain.state.control, actions, {Slot(0): ONE, Slot(1): ONE})
    jobs: list[Job] = []
    trained: list[Any] = [None, None]
    batches: list[list[int]] = [[], []]
    together = threading.Barrier(2, timeout=30)
    for runtime in (first, OneOfTwo(spec, tmp_path, first)):
        jobs.append(Job(runtime))
    models = [job.sparse(Net(), optimizer=OPTIMIZERS[optimizer][0]) for job in jobs]
    opts = [
        job.optimizer(OPTIMIZERS[optimizer][1](job.replicate(m).parameters()))
        for job, m in zip(jobs, models, strict=True)
    ]

    def work(i: int) -> None:
        protocol: Any = jobs[i]._engine.driver.protocol
        protocol.ask_ahead, seen = 0, -1
        if shares.get(i, 0) <= cut:
            protocol.more = list  # one shard an epoch: none is asked for before the last one is done
        jobs[i]._engine.loop._look_ahead = lambda spent_s: None
        loader = jobs[i].loader(data(), batch_size=batch, epochs=EPOCHS, largest_batch=(fits or {}).get(i))
        loader._plan = msgspec.structs.replace(loader.plan(), shard_samples=cut)
        for b in jobs[i].steps(loader):
            item = jobs[i]._engine.tables.current
            assert item is not None and item.work is not None
            epoch = split_key(item.work.lease.shard)[1]
            if epoch > seen:
                together.wait()
            seen = epoch
            batches[i].append(len(b["y"]))
            opts[i].zero_grad()
            ((models[i](b) - b["y"]) ** 2).mean().backward()
            opts[i].step()
        trained[i] = jobs[i]._engine.samples

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(trained) == N * EPOCHS and min(trained) > 0
    for name, want in plain(optimizer).items():
        have = jobs[0].state_dict()["models"][0][name]
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    for job in jobs:
        job.close()
    report = audit(tmp_path)
    assert report.ok, report.text()
    return batches


def test_a_step_that_is_cut_off_leaves_the_batch_in_hand_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss some partitions have consumed some of what a worker has accumulated: that is a step by itself. The
    batch that had begun beside it begins again, with the values behind that step, and nobody waits for ever."""
    alike, asked = WorkerProtocol.alike, itertools.count()
    behind: list[float] = []  # what the first values behind such a step have more than those before it

    def sometimes(protocol: WorkerProtocol, works: Any) -> bool:
        return next(asked) % 3 != 1 and alike(protocol, works)

    monkeypatch.setattr(WorkerProtocol, "alike", sometimes)
    first = OneOfTwo(JobSpec(workers=2, ps=1, consistency="sync", partitions=8), tmp_path, None)
    jobs = [Job(runtime) for runtime in (first, OneOfTwo(JobSpec(), tmp_path, first))]
    ended: list[int] = []

    def work(job: Job) -> None:
        witness = es.testing.Witness(job, N, epochs=2)
        model = job.replicate(job.sparse(witness))
        opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        engine: Any = job._engine
        cut_off, seen = engine.builder.cut, [0.0]

        def cut() -> None:
            cut_off()
            seen.append(float(model.witness_steps.detach().sum()))

        engine.builder.cut = cut
        for i, batch in enumerate(job.steps(job.loader({"row": np.arange(N)}, batch_size=4, epochs=2))):
            if len(seen) > 1:
                behind.append(float(model.witness_steps.detach().sum()) - seen.pop())
            model(batch["row"]).backward()
            if i % 2:
                opt.step()
                opt.zero_grad()
        ended.append(engine.samples + engine._hand.samples)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 2 and sum(ended) == N * 2
    assert behind and min(behind) >= 0 and max(behind) > 0
    for job in jobs:
        job.close()
    report = audit(tmp_path)
    assert report.ok, report.text()
