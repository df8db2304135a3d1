"""Mode allreduce with tables on a ps, in one process: what plain PyTorch computes, and counted at the ps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep as es
from everstep.api.job import Job
from everstep.api.row_entries import pack, unpack
from everstep.errors import InternalError, ScriptError
from everstep.ids import Incarnation, LeaseNo, Slot, TableId
from everstep.model.shard import Token
from everstep.model.table import Rate
from everstep.monitor.audit import audit
from everstep.native.ledger import bitmap
from everstep.net.messages import Push, Pushed
from everstep.tables.step_pushes import Owed, table_shard
from everstep.tables.stepped_rows import Stepped, in_intervals
from everstep.testing.twin import partition_of

N, BATCH = 240, 30


def data() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 40, (N, 3))
    return {"ids": ids, "y": (ids.sum(1) % 2).astype(np.float32)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(40, 4, padding_idx=0)
        self.top = nn.Linear(12, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.top(self.table(batch["ids"]).flatten(1)).squeeze(1)
        return out


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch), batch["y"])


def train(job: Job, model: Any, epochs: int = 2) -> None:
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.steps(job.loader(data(), BATCH, epochs=epochs, shuffle=False)):
        opt.zero_grad()
        loss_of(model, batch).backward()
        opt.step()


def test_both_parts_are_what_plain_pytorch_computes(join: Callable[..., Job]) -> None:
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Net(), optimizer=es.SGD(lr=0.5)))
    train(job, model)
    got = {name: value.clone() for name, value in model.state_dict().items()}
    plain, whole = Net(), {k: torch.from_numpy(v) for k, v in data().items()}
    opt = torch.optim.SGD(
        [{"params": plain.top.parameters(), "lr": 0.1}, {"params": plain.table.parameters(), "lr": 0.5}]
    )
    for _ in range(2):
        for lo in range(0, N, BATCH):
            opt.zero_grad()
            loss_of(plain, {k: v[lo : lo + BATCH] for k, v in whole.items()}).backward()
            opt.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
    run_dir = job.run_dir
    job.close()
    report = audit(Path(run_dir))
    assert report.ok and len(report.finished) == 2, report.text()
    assert report.counts["batches"] == report.counts["steps"] == 2 * N // BATCH
    assert "tables: 16 steps applied at 1 ps x 64 partitions" in report.text()


def test_parts_of_logical_workers_are_summed_in_order(join: Callable[..., Job]) -> None:
    states = []
    for parts in (2, 2, 3):
        job = join(mode="allreduce", ps=1, logical_workers=parts)
        model = job.replicate(job.sparse(Net()))
        train(job, model, epochs=1)
        states.append(model.state_dict()["table.weight"].clone())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_nothing_of_a_step_that_is_not_finite_comes_to_the_ps(join: Callable[..., Job]) -> None:
    job = join(mode="allreduce", ps=1, nonfinite="skip")
    model = job.replicate(job.sparse(Net()))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number, batch in enumerate(job.steps(job.loader(data(), BATCH, shuffle=False))):
        opt.zero_grad()
        out = model.table(batch["ids"]).sum(dim=(1, 2))
        (loss_of(model, batch) + (out * (float("nan") if number == 3 else 0.0)).sum()).backward()
        opt.step()
    assert torch.isfinite(model.state_dict()["table.weight"]).all()
    run_dir = job.run_dir
    job.close()
    report = audit(Path(run_dir))
    assert report.ok and report.counts["skipped_samples"] == BATCH, report.text()


def test_mistakes_are_named(join: Callable[..., Job]) -> None:
    job = join(mode="allreduce")
    with pytest.raises(ScriptError, match="--ps 1"):
        job.sparse(Net())
    job = join(mode="allreduce", ps=1)
    model = job.replicate(Net())
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ScriptError, match="puts no table on them"):
        job.steps(job.loader(data(), BATCH))
    with pytest.raises(ScriptError, match="one ps or none"):
        join(mode="allreduce", ps=2)


def test_gradients_on_their_way() -> None:
    entries = [
        (TableId(7), np.arange(3, dtype=np.int64), np.ones((3, 3), np.float32)),
        (TableId(2), np.arange(0, dtype=np.int64), np.ones((0, 5), np.float32)),
        (TableId(9), np.arange(2, dtype=np.int64), np.full((2, 2), 0.5, np.float32)),
    ]
    blob = torch.from_numpy(np.concatenate([pack(entries), np.zeros(16, np.uint8)]))  # padded to the longest
    for (table, keys, grads), (wanted, its_keys, its_grads) in zip(unpack(blob), entries, strict=True):
        assert table == wanted and np.array_equal(keys, its_keys) and np.array_equal(grads, its_grads)
    assert unpack(torch.from_numpy(pack([]))) == []
    for cut in (0, 8, 40, 100):
        with pytest.raises(InternalError):
            unpack(blob[:cut])


def test_rows_behind_a_step_are_as_the_ps_will_have_them(join: Callable[..., Job]) -> None:
    """Two steps in an iteration, and rows read between and behind them: Adagrad, whose state is on the ps."""
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Net(), optimizer=es.Adagrad(lr=0.5)))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = torch.zeros(0)
    for batch in job.steps(job.loader(data(), BATCH, epochs=1, shuffle=False)):
        with torch.no_grad():
            before = model.table(torch.arange(40)).clone()
        if len(seen):
            torch.testing.assert_close(before, seen, rtol=0, atol=1e-6)
        for _ in range(2):
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
        with torch.no_grad():
            seen = model.table(torch.arange(40)).clone()
        assert not torch.equal(before, seen)
    state = model.state_dict()["table.weight"]
    torch.testing.assert_close(state[1:], seen[1:], rtol=0, atol=1e-6)
    job.close()
    assert audit(Path(job.run_dir)).ok


@pytest.mark.parametrize("behind", [False, True])
def test_rows_that_the_script_edits_and_leaves_so_are_refused(join: Callable[..., Job], behind: bool) -> None:
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Net(), optimizer=es.SGD(lr=0.5)))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ScriptError, match=r"changed rows of table 'table' by hand.*only=.*--mode ps"):
        for batch in job.steps(job.loader(data(), BATCH, shuffle=False)):
            loss_of(model, batch).backward()
            if behind:
                opt.step()
            with torch.no_grad():
                model.table.weight.clamp_(-0.01, 0.01)
            opt.step()


def test_a_step_with_a_table_stepped_several_times_is_several_intervals() -> None:
    def stepped(table: int) -> Stepped:
        return Stepped(TableId(table), np.arange(2), np.ones((2, 4), np.float32), Rate(0.1))

    owed = Owed(7, table_shard(0, 0), 30, 33)
    content = [stepped(1), stepped(2), stepped(1), stepped(1)]
    parts = in_intervals(owed, content)
    assert [(part.lo, part.hi, [s.table for s in found]) for part, found in parts] == [
        (30, 31, [1, 2]),
        (31, 32, [1]),
        (32, 33, [1]),
    ]
    assert in_intervals(owed, []) == [(owed, [])]
    with pytest.raises(ScriptError, match="stepped 4 times in one step of 3 samples"):
        in_intervals(owed, [*content, stepped(1)])


def accumulated(job: Job, model: Any, every: int, epochs: int = 2, nan: int = -1, largest: int = 0) -> None:
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.steps(job.loader(data(), BATCH, epochs=epochs, shuffle=False, largest_batch=largest or None)):
        loss = loss_of(model, batch)
        (loss * (float("nan") if job.step == nan else 1.0)).backward()
        if job.step % every == every - 1:
            opt.step()
            opt.zero_grad()


def plainly(every: int, epochs: int = 2, nan: int = -1) -> dict[str, torch.Tensor]:
    plain, whole = Net(), {k: torch.from_numpy(v) for k, v in data().items()}
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(epochs * N // BATCH):
        lo = number * BATCH % N
        if number != nan:
            loss_of(plain, {k: v[lo : lo + BATCH] for k, v in whole.items()}).backward()
        if number % every == every - 1 and number != nan:
            opt.step()
            opt.zero_grad()
    return plain.state_dict()


@pytest.mark.parametrize("nan", [-1, 4])
def test_gradients_that_wait_go_to_the_ps_with_the_step_that_uses_them(join: Callable[..., Job], nan: int) -> None:
    """Three batches to a step, across the end of the epoch; the last batch is left over. ``nan``: one in between is
    skipped, and what was accumulated before it is not lost."""
    job = join(mode="allreduce", ps=1, nonfinite="skip")
    model = job.replicate(job.sparse(Net()))
    accumulated(job, model, 3, nan=nan)
    wanted = plainly(3, nan=nan)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    job.close()
    report = audit(Path(job.run_dir))
    assert report.ok and len(report.finished) == 2, report.text()
    assert report.counts["left_out_samples"] == BATCH + (BATCH if nan >= 0 else 0), report.counts
    assert "tables: 6 steps applied at 1 ps x 64 partitions" in report.text(), report.text()


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_that_the_script_zeroes_in_a_pass_of_a_step_are_not_lost(
    join: Callable[..., Job], every: int
) -> None:
    """Each batch is computed in three passes, and the script steps and zeroes in each of them: neither their gradients
    are lost, nor what was accumulated before."""
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Net()))
    accumulated(job, model, every, largest=10)
    wanted = plainly(every)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_what_waits_is_a_part_of_the_state(join: Callable[..., Job]) -> None:
    """A state that is copied, or loaded from a checkpoint, between two batches of a step."""
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Net()))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state: Any = job._trainer.state  # type: ignore[attr-defined]
    tables: Any = job._trainer.engine.tables
    for batch in job.steps(job.loader(data(), BATCH, epochs=1, shuffle=False)):
        if job.step == 3:
            packed, digest = state.snapshot(), state.quick_digest()
            ranges = list(tables.carried.held_back.ranges)
            assert [(r.lo, r.hi, r.learnt) for r in ranges] == [(BATCH * 2, BATCH * 3, True)]
            model.table.weight.grad = None
            tables.carried.held_back.ranges.clear()
            assert state.quick_digest() != digest
            state.load(packed, "a copy")
            assert tables.carried.held_back.ranges == ranges and state.quick_digest() == digest
        loss_of(model, batch).backward()
        if job.step % 2:
            opt.step()
            opt.zero_grad()
    wanted = plainly(2, 1)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


class Counted(nn.Module):
    """A row for each sample, which gains one when the sample's gradient is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(N, 1)
        self.top = nn.Linear(1, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.top(torch.zeros(1)).sum() * 0.0 - self.rows(batch["row"]).sum()
        return loss


def test_a_partition_that_has_a_part_of_a_step_gets_only_the_rest(join: Callable[..., Job]) -> None:
    """A line of states that is over has brought some partitions beyond the first batch of a step of two."""
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Counted(), optimizer=es.SGD(lr=1.0)))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    rows = torch.arange(N)
    before = model.state_dict()["rows.weight"].flatten()
    ahead = list(range(0, 64, 2))
    first = True
    for batch in job.steps(job.loader({"row": rows}, BATCH, epochs=1, shuffle=False)):
        if first:
            first = False
            client, shard = job._runtime.client, table_shard(0, 0)
            version, lease = client.router.version, LeaseNo(job._trainer.engine.session.group.lease)  # type: ignore[attr-defined]
            (ps,), lives = client.router.slots, {p.slot: p.incarnation for p in client.router.placement.servers}
            token = Token(shard, 0, BATCH, lease, lives[ps], Slot(0), Incarnation(1))
            push = Push(version, token, (), True, bitmap(ahead, 64), True, left_out=True)
            ticket = client.everywhere(lambda i, ps, push=push: push, client.router)  # type: ignore[misc]
            ticket.wait()
            (answer,) = (answer for _, answer, _ in ticket.answers)
            assert isinstance(answer, Pushed) and answer.applied == len(ahead)
            job._trainer.engine.tables._surveyed = (None, 0, 0)  # type: ignore[union-attr]
        model(batch).backward()
        if job.step % 2:
            opt.step()
            opt.zero_grad()
    gained = (model.state_dict()["rows.weight"].flatten() - before).round().int()
    table = next(iter(job._tables.infos.values())).spec.id
    partition = torch.from_numpy(partition_of(rows.numpy(), table, 64))
    had = torch.isin(partition, torch.tensor(ahead)) & (rows < BATCH)
    assert had.any() and torch.equal(gained, (~had).int())
    job.close()
    assert audit(Path(job.run_dir)).ok


def rest_behind_loops(model: Net, job: Job | None, every: int, steps: int = 1) -> list[torch.Tensor]:
    """A loop for each of two epochs, with a step behind it for what is left (a batch or two). Returns what an
    evaluation behind each of these steps saw. ``job`` None: with plain PyTorch."""
    whole = {k: torch.from_numpy(v) for k, v in data().items()}
    opt: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    opt = opt if job is None else job.optimizer(opt)
    seen = []
    for _ in range(2):
        if job is None:
            batches: Any = [{k: v[lo : lo + BATCH] for k, v in whole.items()} for lo in range(0, N, BATCH)]
        else:
            batches = job.steps(job.loader(data(), BATCH, epochs=1, shuffle=False))
        for number, batch in enumerate(batches):
            (loss_of(model, batch) / every).backward()
            if number % every == every - 1:
                opt.step()
                opt.zero_grad()
        for _ in range(steps):
            opt.step()
        opt.zero_grad()
        with torch.no_grad():
            seen.append(model({"ids": torch.arange(39).reshape(13, 3)}))
    return seen


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_behind_the_loop_consumes_what_the_loop_has_left(join: Callable[..., Job], steps: int) -> None:
    """Eight batches, three to a step; what is seen right behind the step has it, and so has the next loop."""
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Net()))
    got = rest_behind_loops(model, job, 3, steps)
    plain = Net()
    wanted = rest_behind_loops(plain, None, 3, steps)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    job.close()
    report = audit(Path(job.run_dir))
    assert report.ok and len(report.finished) == 2, report.text()
    assert "left_out_samples" not in report.counts or not report.counts["left_out_samples"], report.counts
    assert f"tables: {4 + 2 * steps} steps applied at 1 ps x 64 partitions" in report.text(), report.text()


def test_a_step_behind_the_loop_without_samples_of_its_own_is_refused(join: Callable[..., Job]) -> None:
    job = join(mode="allreduce", ps=1)
    model = job.replicate(job.sparse(Net()))
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.steps(job.loader(data(), BATCH, epochs=1, shuffle=False)):
        opt.zero_grad()
        loss_of(model, batch).backward()
        opt.step()
    with pytest.raises(ScriptError, match=r"behind job.steps\(\): the gradient of table 'table' has no samples"):
        opt.step()
