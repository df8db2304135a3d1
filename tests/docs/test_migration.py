"""The scripts of docs/migration.md run as they stand: the old ones under torchrun, the new ones under everstep."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "migration.md").read_text()
SCRIPTS = {
    code.partition("\n")[0].removeprefix("# "): code for code in re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
}
MYDATA = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import torch
from torch.utils.data import TensorDataset
from fashion import SAMPLE, read

torch.set_num_threads(1)
def pairs(which):
    found = read(SAMPLE, which)
    return torch.from_numpy(found["image"]).flatten(1), torch.from_numpy(found["label"]).long()
dataset = TensorDataset(*pairs("train"))
def accuracy(model):
    x, y = pairs("t10k")
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
"""


def run(name: str, folder: Path, launcher: list[str]) -> float:
    (folder / "mydata.py").write_text(MYDATA)
    (folder / name).write_text(SCRIPTS[name])
    paths = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(folder / name)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = re.findall(r"accuracy ([\d.]+)", done.stdout)
    assert len(found) == 1, done.stdout[-3000:]
    return float(found[0])


EVERSTEP = ["everstep.cli", "run", "--mode", "allreduce", "--workers", "2"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_every_script_is_here() -> None:
    assert set(SCRIPTS) == {
        "ddp.py", "ddp_after.py", "elastic.py", "elastic_after.py", "horovod.py", "horovod_after.py", "amp_after.py",
        "gpu_after.py", "fsdp.py", "fsdp_after.py",
    }  # fmt: skip
    for code in SCRIPTS.values():
        ast.parse(code)  # Horovod's is only read: it is no longer maintained and not installed


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["ddp_after.py", "elastic_after.py", "horovod_after.py", "amp_after.py", "gpu_after.py"]
)
def test_the_new_script_learns(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path, EVERSTEP) > 0.74


@pytest.mark.processes
def test_the_sharded_script_learns(tmp_path: Path) -> None:
    assert run("fsdp_after.py", tmp_path, [*EVERSTEP, "--processes-per-worker", "2"]) > 0.7


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "elastic", "fsdp"])
def test_the_old_script_learns_as_much(name: str, tmp_path: Path) -> None:
    everstep = [*EVERSTEP[:-1], "1", "--processes-per-worker", "2"] if name == "fsdp" else EVERSTEP
    old, new = run(f"{name}.py", tmp_path, TORCHRUN), run(f"{name}_after.py", tmp_path, everstep)
    least = 0.7 if name == "fsdp" else 0.74  # (torch's own script sets no seed: 0.73 has been seen)
    assert old > least and abs(old - new) < 0.05
