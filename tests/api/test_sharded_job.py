"""FSDP2 models in a job of one process: ``fully_shard(..., mesh=job.device_mesh)``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from everstep.api.embedded import EmbeddedRuntime
from everstep.api.job import Job
from everstep.errors import ScriptError


def forked(body: Callable[[Path], None], folder: Path) -> None:
    """In a process of its own: torch's process group and its threads stay out of this one, from which others fork."""
    gc.disable()  # (what other tests have left is the parent's: no finalizer of it may run in the child)
    pid = os.fork()
    if not pid:
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(100)
        status = 1
        try:
            body(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def make(folder: Path, name: str) -> Any:
    return Job(EmbeddedRuntime.alone({"mode": "allreduce", "run_dir": str(folder / name)}, None))


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def train(job: Any, sharded: bool) -> tuple[str, dict[str, torch.Tensor]]:
    """Gradients of two steps are accumulated, and the model is evaluated in the midst of it."""
    x = np.random.default_rng(5).normal(size=(96, 6)).astype(np.float32)
    model = net()
    if sharded:
        for part in (model[3], model):
            fully_shard(part, mesh=job.device_mesh)
    model = job.replicate(model)
    opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in job.steps(job.loader({"x": x, "y": x.sum(1, keepdims=True)}, 8, epochs=2)):
        (model(batch["x"]) - batch["y"]).square().mean().backward()
        if job.step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        elif job.step % 6 == 0:
            with job.eval():
                model(batch["x"])
    found = job.digest(), job.state_dict()["models"][0]
    job.close()
    return found


def same_bits(folder: Path) -> None:
    digest, state = train(make(folder, "plain"), False)
    same, gathered = train(make(folder, "sharded"), True)
    assert same == digest
    for name, value in state.items():
        assert torch.equal(gathered[name], value), name


def mistakes(folder: Path) -> None:
    job = make(folder, "run")
    model = net()
    fully_shard(model[3], mesh=job.device_mesh)
    with pytest.raises(
        ScriptError, match=r"'0.weight' is not sharded: for part in \(\*model.layers, model\): fully_shard"
    ):
        job.replicate(model)
    fully_shard(model, mesh=job.device_mesh)
    job.replicate(model)
    with pytest.raises(ScriptError, match="one model is sharded and another one is not"):
        job.replicate(net())
    with pytest.raises(ScriptError, match="load the plain model before fully_shard"):
        job.load_state_dict({})
    job.close()


def test_a_sharded_model_trains_to_the_same_bits(tmp_path: Path) -> None:
    forked(same_bits, tmp_path)


def test_models_that_cannot_be_trained_so_are_one_line(tmp_path: Path) -> None:
    forked(mistakes, tmp_path)


def old_names(folder: Path) -> None:
    job = make(folder, "old")
    with pytest.warns(FutureWarning, match="job.shards is now job.processes_per_worker; the old name works until"):
        assert job.shards == job.processes_per_worker == 1
    with pytest.warns(FutureWarning, match="job.shard is now job.process_index"):
        assert job.shard == job.process_index == 0
    with pytest.warns(FutureWarning, match="job.shard_mesh is now job.device_mesh"):
        assert job.shard_mesh is job.device_mesh
    job.close()


def test_old_names_of_a_worker_s_processes_work_and_say_so(tmp_path: Path) -> None:
    forked(old_names, tmp_path)
