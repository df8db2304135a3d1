"""A whole job with checkpoints: what ``everstep checkpoint export`` gives is the model that the script ended with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

SCRIPT = """
import numpy as np, torch
from torch import nn
import everstep as es

job = es.join()
model = nn.Sequential(nn.EmbeddingBag(400, 4, mode="sum"), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
model = job.replicate(job.sparse(model))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
rng = np.random.default_rng(0)
data = {"x": rng.integers(0, 400, (3000, 2)), "y": rng.random(3000, np.float32)}
for batch in job.steps(job.loader(data, batch_size=64)):
    opt.zero_grad()
    ((model(batch["x"]).squeeze(-1) - batch["y"]) ** 2).mean().backward()
    opt.step()
torch.save(job.state_dict()["models"][0], job.run_dir + "/model.pt")
"""


@pytest.mark.processes
def test_export_is_the_model_that_the_script_ended_with(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "train.py").write_text(SCRIPT)
    run_dir, out = tmp_path / "run", tmp_path / "out"
    everstep = [sys.executable, "-m", "everstep.cli.main"]
    command = [*everstep, "run", "--ps", "2", "--checkpoint-every", "1s", "--run-dir", str(run_dir), "--no-display"]
    subprocess.run([*command, str(tmp_path / "train.py")], check=True, timeout=280, capture_output=True)
    for verb in (["verify", run_dir], ["export", run_dir, out]):
        subprocess.run([*everstep, "checkpoint", *map(str, verb)], check=True, timeout=240, capture_output=True)
    model = torch.load(run_dir / "model.pt", weights_only=True)
    dense = load_file(out / "dense.safetensors")
    assert set(dense) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    for name, value in dense.items():
        assert torch.equal(value, model[name]), name
    (table,) = out.glob("*.parquet")
    rows = pq.read_table(table).to_pydict()
    (weight,) = (v for n, v in model.items() if n not in dense)
    assert sorted(rows["key"]) == list(range(400))
    for key, values in zip(rows["key"], rows["values"], strict=True):
        assert torch.equal(torch.tensor(values), weight[key])
