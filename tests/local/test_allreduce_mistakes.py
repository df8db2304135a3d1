"""Mistakes in mode allreduce end in one clear line, or are no mistakes at all; none of them hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_jobs import ReplicaRun

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
BOTH = ("--min-workers", "2")
"""From the beginning: one that joins later takes over the others' state, or comes when all is trained."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ReplicaRun]:
    made = ReplicaRun(tmp_path)
    made.write(rows=320, epochs=2, pause_s=0.0)
    yield made
    made.close()


def change(run: ReplicaRun, old: str, new: str) -> None:
    text = run.script.read_text()
    assert old in text
    run.script.write_text(text.replace(old, new, 1))


def ends_with(run: ReplicaRun, code: int, *words: str) -> str:
    """The job ended with this code, and one line says all of ``words``."""
    assert run.wait(280.0) == code, run.story()
    lines = [line for line in run.text().splitlines() if all(word in line for word in words)]
    assert lines, run.story()
    assert run.leftovers() == {}
    return lines[-1]


def test_parameters_that_differ_between_workers(run: ReplicaRun) -> None:
    change(run, "layers = nn", "torch.manual_seed(int(job.slot))\nlayers = nn")
    run.train(2, *BOTH)
    ends_with(run, 1, "0.weight", "differ")


def test_fewer_samples_than_logical_workers(run: ReplicaRun) -> None:
    run.write(rows=3, epochs=1, pause_s=0.0, batch=2)
    run.train(2, "--logical-workers", "4")
    ends_with(run, 2, "3 samples", "4 logical workers")


def test_an_unused_parameter_is_no_mistake(run: ReplicaRun) -> None:
    change(run, "model = job", "net.register_parameter('unused', nn.Parameter(torch.ones(3)))\nmodel = job")
    run.train(2, *BOTH).finished(states=2)


def test_a_parameter_that_only_some_use_is_no_mistake(run: ReplicaRun) -> None:
    change(run, "model = job", "net.register_parameter('extra', nn.Parameter(torch.ones(1)))\nmodel = job")
    change(run, "opt.zero_grad()", "loss = loss + (model.extra.sum() if job.slot else 0.0); opt.zero_grad()")
    run.train(2, *BOTH).finished(states=2)


def test_an_optimizer_that_was_not_passed(run: ReplicaRun) -> None:
    change(run, "opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))",
           "opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)")  # fmt: skip
    run.train(2)
    ends_with(run, 1, "job.optimizer")


def test_a_loss_that_is_not_a_number(run: ReplicaRun) -> None:
    change(run, "opt.zero_grad()", "loss = loss * (float('nan') if job.slot else 1.0); opt.zero_grad()")
    run.train(2, *BOTH)
    ends_with(run, 1, "finite")


def test_a_script_that_makes_its_own_process_group(run: ReplicaRun) -> None:
    change(run, "job = es.join", "import torch.distributed as dist\njob = es.join")
    change(run, "net = nn", "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\nnet = nn")
    run.train(2)
    ends_with(run, 1, "init_process_group")


def test_a_scheduler_that_is_not_tracked(run: ReplicaRun) -> None:
    change(run, 'print("worker"', 'scheduler = torch.optim.lr_scheduler.StepLR(opt, 5)\nprint("worker"')
    change(run, "opt.step()", "opt.step(); scheduler.step()")
    run.train(2)
    ends_with(run, 1, "job.track")
