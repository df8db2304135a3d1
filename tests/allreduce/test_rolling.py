"""Replicas are compared while they train: a difference is found within 50 steps, named, and healed by the majority."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from replica_group import Broken, Exchange, Worker, agree, digests, group_of
from torch import nn

from everstep.allreduce.rolling import WITHIN_STEPS
from everstep.allreduce.state import ReplicaState
from everstep.errors import ReplicasDifferError
from everstep.net.auth import create_secret
from everstep.net.rendezvous import SECRET_FILE


def built(*sizes: int) -> tuple[nn.Module, torch.optim.Optimizer, ReplicaState]:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b)]
    model = nn.Sequential(*layers)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(4, sizes[0])).sum().backward()
    opt.step()
    return model, opt, ReplicaState([model], [opt], {"average": torch.optim.swa_utils.AveragedModel(model)})


@pytest.mark.parametrize("sizes", [(3, 2), (8,) * 9, (8,) * 60, (600, 700, 5), (3000, 20, 3000)])
@pytest.mark.parametrize("begin", [0, 7])
def test_any_number_that_differs_is_found_within_the_steps(sizes: tuple[int, ...], begin: int) -> None:
    """Also one that has followed since another step than the others."""
    mine, other = built(*sizes)[2], built(*sizes)[2]
    for step in range(begin):
        mine.slice_digest(step)
    steps = range(begin, begin + WITHIN_STEPS)
    assert [mine.slice_digest(s) for s in steps] == [other.slice_digest(s) for s in steps]
    tensors = [named for named in other.tensors() if named.tensor.numel()]
    assert len(tensors) > 4 * (len(sizes) - 1)
    picked = tensors if len(tensors) < 40 else tensors[:: len(tensors) // 20]
    for name, tensor in picked:
        at = tensor.numel() * 2 // 3
        with torch.no_grad():
            flat = tensor.data.view(-1)
            old = flat[at].clone()
            flat[at] += 1
            assert any(mine.slice_digest(s) != other.slice_digest(s) for s in steps), name
            flat[at] = old


# ---------------------------------------------------------------- comparing and healing


@pytest.fixture
def hire(tmp_path: Path) -> Iterator[Callable[[int], Worker]]:
    create_secret(tmp_path / SECRET_FILE)
    made: list[Worker] = []

    def one(slot: int) -> Worker:
        made.append(Worker(tmp_path, slot))
        return made[-1]

    yield one
    for worker in made:
        worker.replica.close()


def compare(workers: list[Worker]) -> None:
    group, exchange = group_of(1, workers), Exchange(len(workers))

    def one(rank: int) -> None:
        try:
            workers[rank].replica.compare(group, rank, exchange.gather(rank))
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        errors = [e for f in [pool.submit(one, r) for r in range(len(workers))] if (e := f.exception()) is not None]
    for error in errors:
        if not isinstance(error, Broken):
            raise error


def drift(worker: Worker) -> None:
    with torch.no_grad():
        worker.run.model[3].bias[1] += 1e-6


def test_the_majority_heals_the_one_that_drifted(hire: Any, caplog: pytest.LogCaptureFixture) -> None:
    workers = [hire(0), hire(1), hire(2)]
    agree(1, workers)
    for worker in workers:
        worker.train(3)
    right = workers[1].run.state.digest()
    drift(workers[0])
    compare(workers)
    assert digests(workers) == {right}
    assert [w.replica.healed for w in workers] == [1, 0, 0]
    assert "the digest of '3.bias' is" in caplog.text and "worker:0 #1 take the state of worker:1" in caplog.text
    compare(workers)  # (nothing differs: a false alarm)
    assert [w.replica.healed for w in workers] == [1, 0, 0]


def test_of_two_nobody_is_right_unless_a_setting_says_who(hire: Any) -> None:
    workers = [hire(4), hire(2)]
    agree(1, workers)
    for worker in workers:
        worker.train(3)
    drift(workers[0])
    with pytest.raises(
        ReplicasDifferError, match=r"digest of '3.bias' is \w{16} on worker:4, \w{16} on worker:2.*--heal-from"
    ):
        compare(workers)
    right = workers[1].run.state.digest()
    for worker in workers:
        worker.runtime.spec = msgspec.structs.replace(worker.runtime.spec, heal_from="lowest")
    compare(workers)
    assert digests(workers) == {right}
