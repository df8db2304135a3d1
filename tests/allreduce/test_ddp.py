"""Beside torch's own DistributedDataParallel: two workers, the same seed, data and script, and the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import ListLoader, Member, run_group
from scripts import State, data, loss_of, net, values
from torch import distributed, nn

from everstep.config.spec import JobSpec

SAMPLES, BATCH, EPOCHS = 64, 8, 3


class Parts:
    """What a script is given; ``extra``: what it changes besides the model."""

    def __init__(
        self, model: Any, opt: Any, batches: Iterator[Any], no_sync: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.model, self.opt, self.batches, self.no_sync = model, opt, batches, no_sync
        self.track: Callable[..., None] = lambda **objects: None


Script = Callable[[Parts], None]


def clipped_and_scheduled(p: Parts) -> None:
    """Batch norm, clipping, a learning rate that changes."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(p.opt, 9)
    p.track(scheduler=scheduler)
    for batch in p.batches:
        p.opt.zero_grad()
        loss_of(p.model, batch).backward()
        nn.utils.clip_grad_norm_(p.model.parameters(), 0.2)
        p.opt.step()
        scheduler.step()


def accumulated(p: Parts) -> None:
    """Two batches a step; the first one's gradients need not be reduced."""
    for number, batch in enumerate(p.batches):
        if number % 2:
            (loss_of(p.model, batch) / 2).backward()
            p.opt.step()
            p.opt.zero_grad()
        else:
            with p.no_sync():
                (loss_of(p.model, batch) / 2).backward()


def in_mixed_precision(p: Parts) -> None:
    """bfloat16, and a scale that is too large at first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
    p.track(scaler=scaler)
    for batch in p.batches:
        p.opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(p.model, batch)
        scaler.scale(loss * 16).backward()
        scaler.unscale_(p.opt)
        nn.utils.clip_grad_norm_(p.model.parameters(), 1.0)
        scaler.step(p.opt)
        scaler.update()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def ours(script: Script, norm: bool) -> list[State]:
    def member(m: Member) -> State:
        model = m.replicate(net(norm))
        batches = m.steps(ListLoader(data(SAMPLES), BATCH, EPOCHS))
        parts = Parts(model, m.optimizer(sgd(model)), batches, m.engine.no_sync)
        parts.track = m.track
        script(parts)
        return values(model)

    return run_group(2, JobSpec(workers=2), member)


def ddp(script: Script, norm: bool) -> list[State]:
    """Each rank keeps its own running statistics, as it would without ``broadcast_buffers``."""
    with tempfile.TemporaryDirectory() as folder:

        def member(m: Member) -> State:
            store = distributed.FileStore(str(Path(folder) / "ddp"), 2)
            distributed.init_process_group("gloo", store=store, rank=m.rank, world_size=2)
            model = nn.parallel.DistributedDataParallel(net(norm), broadcast_buffers=False)
            samples = data(SAMPLES)

            def batches() -> Iterator[Any]:
                for _ in range(EPOCHS):
                    for lo in range(m.rank * BATCH, SAMPLES, 2 * BATCH):
                        yield {name: tensor[lo : lo + BATCH] for name, tensor in samples.items()}

            script(Parts(model, sgd(model), batches(), model.no_sync))
            return values(model.module)

        return run_group(2, JobSpec(workers=2), member)


@pytest.mark.parametrize(
    ("script", "norm", "exact"),
    [(clipped_and_scheduled, True, True), (accumulated, False, False), (in_mixed_precision, False, True)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_weights_are_those_of_ddp(script: Script, norm: bool, exact: bool) -> None:
    """``exact``: the mean over two is a sum and an exact halving, so the bits are the same; gradients that are reduced
    batch by batch and those that are first added up differ in the last ones. Running statistics: the mean of both."""
    found, other = ours(script, norm)
    first, second = ddp(script, norm)
    assert not torch.allclose(found["0.weight"], net().state_dict()["0.weight"])  # it was trained
    for name, value in found.items():
        assert torch.equal(value, other[name]), name
        if "running" in name:
            torch.testing.assert_close(value, (first[name] + second[name]) / 2)
        elif exact:
            assert torch.equal(value, first[name]), f"{name}: {value} {first[name]}"
        else:
            torch.testing.assert_close(value, first[name], rtol=1e-4, atol=1e-6)
