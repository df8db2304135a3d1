"""A job that ends in order leaves its model, in files that plain PyTorch reads, and says where."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from local_jobs import Run
from torch import nn

SCRIPT = """
import os, time
from pathlib import Path
import numpy as np, torch
from torch import nn
import everstep as es

here = Path({here!r})
job = es.join()
rng = np.random.default_rng(0)
ids = rng.integers(0, 50, (640, 2))
data = {{"ids": ids, "label": (ids.sum(1) % 2).astype(np.float32)}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4, mode="sum")
        self.top = nn.Linear(4, 1)
    def forward(self, b):
        return self.top(self.bag(b["ids"])).squeeze(1)

net = Net()
model = job.replicate(job.sparse(net) if job.spec.ps else net)
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
for batch in job.steps(job.loader(data, batch_size=32, epochs={epochs})):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep({pause_s})
if job.chief:
    with job.eval(model):
        torch.save({{name: p.detach().clone() for name, p in model.named_parameters()
                    if not hasattr(p, "everstep_table")}}, here / "mine.pt")
        keys = torch.arange(50).unsqueeze(1)
        torch.save(net.bag(keys).detach().clone(), here / "rows.pt")
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4, mode="sum")
        self.top = nn.Linear(4, 1)


class ModelRun(Run):
    def write(self, epochs: int = 2, pause_s: float = 0.0) -> None:  # type: ignore[override]
        self.script.write_text(SCRIPT.format(here=str(self.folder), epochs=epochs, pause_s=pause_s))

    @property
    def model(self) -> Path:
        return self.run_dir / "model"

    def summary(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.run_dir / "summary.json").read_text())
        return found


RUN = ModelRun
PS, GROUP, HYBRID = ("--ps", "2"), ("--mode", "allreduce"), ("--mode", "allreduce", "--ps", "1")


@pytest.mark.parametrize("mode", [PS, GROUP, HYBRID], ids=["ps", "group", "hybrid"])
def test_a_job_that_is_done_leaves_what_its_chief_saw(run: ModelRun, mode: tuple[str, ...]) -> None:
    run.start("--workers", "2", *mode)
    run.ended_well()
    mine = torch.load(run.folder / "mine.pt", weights_only=True)
    dense = safetensors.torch.load_file(run.model / ("dense.safetensors" if mode is PS else "model.safetensors"))
    missing, unexpected = Net().load_state_dict(dense, strict=False)
    assert not unexpected and set(missing) <= {"bag.weight"}
    for name in ("top.weight", "top.bias"):
        assert torch.equal(dense[name], mine[name]), f"{name} is not what the chief had at the end"
    if mode is GROUP:
        rows = dense["bag.weight"]
    else:
        table = safetensors.torch.load_file(run.model / "tables" / "bag.safetensors")
        rows = torch.zeros(50, 4)
        rows[table["keys"]] = table["values"]
        assert len(table["state"]) == len(table["keys"]) > 0
    assert torch.equal(rows, torch.load(run.folder / "rows.pt", weights_only=True))
    about = json.loads((run.model / "model.json").read_text())
    assert all((run.model / name).stat().st_size == size for name, size in about["files"].items())
    said = run.summary()["model"]
    assert isinstance(said, dict) and said["url"] == str(run.model) and str(run.model) in run.text()
    assert "everstep resume" in run.text()


@pytest.mark.parametrize("mode", [PS, GROUP], ids=["ps", "group"])
def test_ctrl_c_leaves_the_model_and_the_job_goes_on_from_it(run: ModelRun, mode: tuple[str, ...]) -> None:
    run.write(epochs=40, pause_s=0.05)
    run.start("--workers", "2", *mode)
    run.trained(200)
    assert run.popen is not None
    run.popen.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.story()
    name = "dense.safetensors" if mode is PS else "model.safetensors"
    dense = safetensors.torch.load_file(run.model / name)
    assert not np.isnan(dense["top.weight"].numpy()).any()
    about = json.loads((run.model / "model.json").read_text())
    assert about["samples"] > 0 and about["checkpoint"] > 0
    run.write(epochs=1 + about["samples"] // 640)
    code, text = run.everstep("resume", str(run.run_dir), "--no-display", "--workers", "1", timeout_s=240.0)
    assert code == 0, text
    assert f"{about['samples']:,} samples are done" in text


def test_a_model_that_is_too_large_asks_for_a_place_and_one_is_left_where_it_was_named(
    run: ModelRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_MODEL_LIMIT", "1000")
    run.start("--workers", "1", *GROUP)
    run.ended_well()
    assert not (run.model / "model.json").exists() and "--model-to" in run.text()
    run.run_dir = run.folder / "second"
    named = run.folder / "models" / "best"
    run.start("--workers", "1", *GROUP, "--model-to", str(named))
    run.ended_well()
    assert (named / "model.safetensors").exists() and str(named) in run.text()
    run.run_dir = run.folder / "third"
    run.start("--workers", "1", *PS, "--model-to", "none")
    run.ended_well()
    assert not run.model.exists() and "model:" not in run.text()
    assert not (run.run_dir / "checkpoints").exists()
