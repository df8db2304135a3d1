"""What ``everstep`` shows of itself, and the keys of a job's state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import everstep as es
from everstep.api.job import Job
from everstep.errors import ScriptError


def test_dir_shows_the_public_names_and_no_others() -> None:
    shown = {name for name in dir(es) if not name.startswith("__")}
    assert shown == {name for name in es.__all__ if not name.startswith("__")}
    assert {"join", "Job", "nn", "SGD", "Adagrad", "Adam", "Constant"} <= shown
    for name in shown:
        assert getattr(es, name) is not None
    with pytest.raises(AttributeError, match="'everstep' has no attribute 'Adamm'"):
        _ = es.Adamm


def test_dir_imports_no_torch() -> None:
    code = "import sys, everstep; assert 'join' in dir(everstep); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
@pytest.mark.parametrize("models", [1, 2])
def test_the_state_has_the_keys_that_it_says(join: Callable[..., Job], mode: str, models: int) -> None:
    def prepared() -> tuple[Job, list[nn.Module], list[torch.optim.Optimizer]]:
        job = join(mode=mode)
        made = [job.replicate(nn.Linear(2, 1)) for _ in range(models)]
        return job, made, [job.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in made]

    job, made, optimizers = prepared()
    for batch in job.steps(job.loader({"x": np.ones((8, 2), np.float32)}, 4)):
        for model, optimizer in zip(made, optimizers, strict=True):
            optimizer.zero_grad()
            with job.no_sync() if model is not made[-1] else torch.enable_grad():
                model(batch["x"]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    state = job.state_dict()
    documented = (Job.state_dict.__doc__ or "").replace("``", "'")
    assert all(f"'{key}'" in documented for key in state)
    assert ("model" in state) == (models == 1) and len(state["models"]) == models == len(state["optimizers"])
    for model, values in zip(made, state["models"], strict=True):
        assert torch.equal(values["weight"], model.weight)  # type: ignore[arg-type]
    if models == 1:
        assert state["model"] is state["models"][0]
    kept = [{k: v.clone() for k, v in values.items()} for values in state["models"]]
    job, made, _ = prepared()
    with pytest.raises(ScriptError, match="no key 'models' or 'model'"):
        job.load_state_dict({"weights": {}})
    only = {"model": kept[0], "optimizers": state["optimizers"]} if models == 1 else {**state, "models": kept}
    job.load_state_dict(only)
    for model, values in zip(made, kept, strict=True):
        assert torch.equal(model.weight, values["weight"])  # type: ignore[arg-type]
