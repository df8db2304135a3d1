"""docs/ray.md and docs/slurm.md: their commands and flags exist, and, at length, all are run on real clusters."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from everstep.cli.link import ask_view
from everstep.cli.main import cli
from everstep.errors import EverstepError

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("ray", "slurm")}
BLOCKS = {name: page.split("```")[1::2] for name, page in PAGES.items()}
SHELL = {
    name: [line for block in blocks if block.startswith("sh\n") for line in block.splitlines()[1:]]
    for name, blocks in BLOCKS.items()
}
SCRIPT = """
import time
import numpy as np, torch
import everstep as es

job = es.join()
x = np.arange(4000, dtype=np.float32)
model = job.replicate(torch.nn.Linear(1, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
for batch in job.steps(job.loader({"x": x}, batch_size=20, epochs=1000)):
    opt.zero_grad(); model(batch["x"].reshape(-1, 1)).sum().backward(); opt.step()
    time.sleep(0.1)
"""


@pytest.mark.parametrize("page", PAGES)
def test_every_verb_flag_and_setting_exists(page: str) -> None:
    used = [line.rstrip("&").split() for line in SHELL[page] if line.startswith("everstep ")]
    assert len(used) >= 6
    for _, verb, *words in used:
        known = {flag for option in cli.commands[verb].params for flag in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, words
    flags = {flag for option in cli.commands["run"].params for flag in option.opts}
    told = [line.split("|")[1] for line in PAGES[page].splitlines() if line.startswith("| `--")]
    for cell in told:
        assert {word.split()[0] for word in cell.split("`")[1::2] if word.startswith("--")} <= flags, cell


class Shell:
    """Is where a reader types the commands of a page."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        (folder / "train.py").write_text(SCRIPT)
        commands = folder / "bin"
        commands.mkdir()
        for name, module in {"everstep": "everstep.cli", "ray": "ray.scripts.scripts"}.items():
            command = commands / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            command.chmod(0o755)
        path = f"{commands}:{env.get('PATH', os.environ['PATH'])}"
        self.folder, self.env = folder, {**os.environ, **env, "PATH": path}
        self.job: subprocess.Popen[bytes] | None = None

    def type(self, line: str) -> str:
        """Run a line; one that ends with & stays behind."""
        if line.endswith(" &"):
            with (self.folder / "job.log").open("ab") as out:
                words = f"exec {line[:-2]} --no-display" if " -- " in line else f"exec {line[:-2]}"
                self.job = subprocess.Popen(["sh", "-c", words], cwd=self.folder, env=self.env, stdout=out, stderr=out)
            return ""
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, (line, done.stderr, self.log())
        return done.stdout

    def log(self) -> str:
        logs = [self.folder / "job.log", *self.folder.glob("*/nodes/*.log"), self.folder / "flights.log"]
        return "\n".join(log.read_text()[-2000:] for log in logs if log.exists())

    def until(self, members: int, whole: bool = True, run_dir: str = "flights") -> None:
        """Wait until so many workers and as many ps are up, and, if ``whole``, every partition is protected."""
        end = time.monotonic() + 240
        view = None
        while True:
            with contextlib.suppress(EverstepError):
                view = ask_view(self.folder / run_dir)
                up = [m for m in view.members if m.up and m.role != "master"]
                safe = view.protection is not None and view.protection.full == 64 and view.samples_total > 0
                if len(up) == 2 * members and (safe or not whole):
                    return
            assert time.monotonic() < end, (members, view, self.log())
            time.sleep(0.2)

    def close(self) -> None:
        if self.job is not None and self.job.poll() is None:
            self.job.terminate()
            try:
                self.job.wait(60)
            except subprocess.TimeoutExpired:
                self.job.kill()
                self.job.wait(30)


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[list[Shell]]:
    made: list[Shell] = []
    yield made
    for each in made:
        each.close()


def follow(shell: Shell, line: str) -> None:
    """Type a line of a page, and wait for what the page says of it."""
    shell.type(line)
    if line.startswith("everstep run"):
        shell.until(3)
    elif line.startswith("ray job submit"):
        shell.until(3, run_dir="submitted")
    elif line.startswith("everstep scale"):
        shell.until(2)
    elif line.startswith("everstep stop"):
        assert shell.job is not None and shell.job.wait(180) in (0, 130, 143), shell.log()


@pytest.mark.slow
@pytest.mark.platforms
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_the_page_of_slurm(tmp_path: Path, shells: list[Shell]) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "platforms"))
    from slurm_here import SlurmHere, missing

    if missing():
        pytest.skip(missing())
    slurm = SlurmHere(3)
    try:
        shell, down = Shell(tmp_path, slurm.env), False
        shells.append(shell)
        for line in SHELL["slurm"]:
            if line.startswith("sbatch"):
                break
            follow(shell, line)
            down = down or "state=DOWN" in line
            if "state=DOWN" in line:
                shell.until(2, whole=False)
            elif line.startswith("everstep status") and down:
                shell.until(3)
        assert not slurm.jobs()

        (batch,) = [block for block in BLOCKS["slurm"] if block.startswith("\n#!/bin/sh")]
        shutil.rmtree(tmp_path / "flights")
        (tmp_path / "train.sbatch").write_text(batch.strip() + "\n")
        shell.type("sbatch train.sbatch")
        shell.until(2)
        shell.type("everstep stop flights")
        end = time.monotonic() + 120
        while slurm.jobs():
            assert time.monotonic() < end, slurm.jobs()
            time.sleep(0.5)
    finally:
        slurm.close()


@pytest.mark.slow
@pytest.mark.platforms
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.long
def test_the_page_of_ray(tmp_path: Path, shells: list[Shell]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'everstep[ray]'")
    sys.path.insert(0, str(ROOT / "tests" / "platforms"))
    from ray_here import RayHere

    jobs = importlib.util.find_spec("aiohttp_cors") is not None
    ray = RayHere(3, jobs=jobs)
    try:
        shell = Shell(tmp_path, {"RAY_ADDRESS": ray.address, "RAY_API_SERVER_ADDRESS": ray.jobs_at})
        shells.append(shell)
        (settings,) = [block.removeprefix("json\n") for block in BLOCKS["ray"] if block.startswith("json\n")]
        (tmp_path / "train.json").write_text(settings)
        killed = False
        for line in SHELL["ray"]:
            if line.startswith("pip "):
                continue
            if line.startswith("ray job submit") and not jobs:
                break
            follow(shell, line)
            if line.startswith("everstep status") and not killed:
                killed = True
                ray.kill_node()
                shell.until(2, whole=False)
                ray.add()
                shell.until(3)
        assert ray.left() == "[[], []]"

        (code,) = [block.removeprefix("python\n") for block in BLOCKS["ray"] if block.startswith("python\n")]
        (tmp_path / "train.py").write_text(SCRIPT.replace("epochs=1000", "epochs=1"))
        (tmp_path / "start.py").write_text(code + "raise SystemExit(exit_code)\n")
        shell.type(f"{sys.executable} start.py")
        assert ray.left() == "[[], []]"
    finally:
        ray.close()
