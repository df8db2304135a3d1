"""A model in stages, as a real job: its processes are killed, and it trains what plain PyTorch trains in one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from local_jobs import Run, processes_of
from torch import nn

from everstep.cli.status import stop_job
from everstep.data.loader import Loader
from everstep.model.member import Role

torch.set_num_threads(1)  # other tests fork from this process
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

MODEL = """
import os, time
import torch
from torch import nn
from torch.distributed import pipelining

def data():
    made = torch.Generator().manual_seed(1)
    x = torch.randn({rows}, 8, generator=made)
    return {{"x": x.numpy(), "y": (x @ torch.randn(8, 3, generator=made)).tanh().numpy()}}

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
"""

SCRIPT = """
import everstep as es

torch.set_num_threads(1)
job = es.join(mode="pipeline")
life = int(os.environ.get("EVERSTEP_INCARNATION", 1))
deaths = eval(open("deaths").read())

def die(where):
    # at a step, or the first one behind it that this worker is in
    for step, slot, place, lives in deaths:
        if job.step >= step and (slot, place, lives) == (job.slot, where, life):
            os.kill(os.getpid(), deaths[step, slot, place, lives])

def loss_fn(out, y):
    die("loss")
    return nn.functional.mse_loss(out, y)

model = job.pipeline(
    build(), schedule=pipelining.{schedule}, microbatches={microbatches}, loss_fn=loss_fn
)
opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
rate = torch.optim.lr_scheduler.StepLR(opt, 10, 0.7)
job.track(rate=rate)
for batch in job.steps(job.loader(data(), batch_size={batch}, epochs=2)):
    if job.slot == 1:
        open("back" if life > 1 else "here", "w").close()
    opt.zero_grad()
    loss = model.step(batch["x"], target=batch["y"])
    die(job.process_index)
    {change}
    job.clip_grad_norm_(0.5)
    opt.step()
    rate.step()
    job.report(loss=loss)
    time.sleep({pause})
with job.eval():
    out = model(torch.ones(3, 8))
digest, state = job.digest(), job.state_dict()["model"]
if job.process_index == 0:
    torch.save((dict(state), out), "state%d.tmp" % job.slot)
    os.replace("state%d.tmp" % job.slot, "state%d.pt" % job.slot)
    print("state", digest, flush=True)
"""

ROWS = 310


class PipelineRun(Run):
    batch = 10

    def write(self, *_: Any, pause: str = "0.0", schedule: str = "Schedule1F1B", change: str = "", m: int = 4) -> None:
        text = (MODEL + SCRIPT).format(
            rows=ROWS, batch=self.batch, pause=pause, schedule=schedule, change=change, microbatches=m
        )
        self.script.write_text(text)
        (self.folder / "deaths").write_text("{}")

    def train(self, *flags: str, deaths: str = "{}") -> PipelineRun:
        (self.folder / "deaths").write_text(deaths)
        self.start("--mode", "pipeline", "--strategy", "fixed", *flags)
        return self

    def start_verb(self, *argv: str) -> None:
        with self.out.open("wb") as out:
            command = [sys.executable, "-m", "everstep.cli", *argv]
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder)

    def logs(self) -> str:
        return "".join(log.read_text() for log in sorted((self.run_dir / "logs").glob("worker-*.log")))

    def finished(self, states: int = 0) -> dict[str, torch.Tensor]:
        """Well: all samples exactly once, the same state on all workers (``states``; 0: any number). Returns it."""
        assert self.wait(240) == 0, self.story() + self.logs()
        code, out = self.everstep("audit", str(self.run_dir))
        assert code == 0 and "exactly once" in out, out
        found = re.findall(r"state ([0-9a-f]{16})", self.logs())
        assert len(found) == (states or len(found)) and len(set(found)) == 1, self.story()
        assert self.leftovers() == {}
        state, output = torch.load(self.folder / "state0.pt")
        model: Any = plain(0, 0)
        model.load_state_dict(state)
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(3, 8)), output)
        return dict(state)

    def refused(self, code: int, *words: str) -> None:
        """The job ends with this code, and one line of it says all of ``words``."""
        assert self.wait(240) == code, self.story()
        assert any(all(word in line for word in words) for line in self.text().splitlines()), self.story()
        assert self.leftovers() == {}


RUN = PipelineRun


def plain(batch: int, epochs: int = 2) -> nn.Module:
    """The model, trained in this process by plain PyTorch."""
    names: dict[str, Any] = {}
    exec(MODEL.format(rows=ROWS), names)
    torch.manual_seed(0)
    model: nn.Module = names["build"]()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    rate = torch.optim.lr_scheduler.StepLR(opt, 10, 0.7)
    loader = Loader(names["data"](), max(1, batch), epochs=2, seed=0)
    for epoch in range(epochs):
        for lo in range(0, ROWS, batch):
            opt.zero_grad()
            read = loader.read(epoch, lo, min(ROWS, lo + batch))
            nn.functional.mse_loss(model(read["x"]), read["y"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            rate.step()
    return model


def close_to_plain(state: dict[str, torch.Tensor], batch: int) -> None:
    for name, expected in plain(batch).state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-5)


def alone(run: PipelineRun) -> tuple[dict[str, torch.Tensor], str]:
    """What ``python train.py`` trains: all stages in one process."""
    folder = run.folder / "alone"
    folder.mkdir()
    (folder / "deaths").write_text("{}")
    done = subprocess.run(
        [sys.executable, str(run.script)], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    digest = re.findall(r"state ([0-9a-f]{16})", done.stdout)
    return torch.load(folder / "state0.pt")[0], digest[0]


def test_stages_of_two_replicas_are_killed(run: PipelineRun) -> None:
    """First the last stage of one replica, in the midst of its microbatches; then the first stage of the other, behind
    a committed step's backward."""
    run.write(pause="0.02 if os.path.exists('here' if job.step < 4 else 'back') else 2.0")
    run.train(
        "--workers", "2", "--stages", "2", "--min-workers", "1", deaths="{(4, 1, 'loss', 1): 9, (24, 0, 0, 1): 9}"
    )
    close_to_plain(run.finished(states=2), 2 * run.batch)
    assert "process 1 of this worker ended with status -9: all of it ends" in run.logs()
    assert "failures survived: 2 worker" in run.text()


def test_the_only_replica_is_killed_and_goes_on_bit_for_bit(run: PipelineRun) -> None:
    """It goes on from the copies of its stages, without any checkpoint: at most a step besides the one in hand is done
    again. The state is that of a run that nobody disturbed, with its optimizer, and that of all stages in one
    process."""
    run.write(pause="0.01")
    run.train("--stages", "3", "--copy-every", "1", deaths="{(17, 0, 2, 1): 9, (40, 0, 0, 2): 9}")
    state = run.finished(states=1)
    expected, digest = alone(run)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    assert f"state {digest}" in run.logs()
    close_to_plain(state, run.batch)
    assert "failures survived: 2 worker" in run.text()
    code, out = run.everstep("audit", str(run.run_dir))
    void = re.search(r"steps committed 62(?:, (\d) more void)?", out)
    assert code == 0 and void is not None and int(void[1] or 0) <= 2, out
    assert run.text().count("from the copy of worker:0") >= 1, run.text()
    code, out = run.everstep("bubbles", str(run.run_dir), "--out", str(run.folder / "job.svg"))
    assert code == 0 and "3 stages, Schedule1F1B, 4 microbatches of 10 samples" in out and "33.3 %" in out, out
    assert "stage 2" in (run.folder / "job.svg").read_text()
    assert "worker:0 stage 2: " in out and "a copy in each: as the job says" in out, out


@pytest.mark.slow
def test_without_copies_the_newest_checkpoint_is_what_is_left(run: PipelineRun) -> None:
    run.write(pause="0.01")
    run.train("--stages", "2", "--copy-every", "off", "--checkpoint-every", "5batches", deaths="{(17, 0, 1, 1): 9}")
    run.finished(states=1)
    assert "from the copy" not in run.text()


@pytest.mark.slow
def test_stopped_and_resumed_with_another_number_of_stages(run: PipelineRun) -> None:
    run.write(pause="0.02 if job.step < 22 else 0.3")
    run.train("--stages", "2", "--checkpoint-every", "5batches")
    run.trained(22 * run.batch)
    stop_job(run.run_dir, True)
    assert run.wait() == 0, run.story()
    run.write()
    old, run.run_dir = run.run_dir, run.folder / "resumed"
    run.start_verb("resume", str(old), "--stages", "3", "--run-dir", str(run.run_dir), "--no-display")
    state = run.finished(states=1)
    assert "resume: checkpoint" in run.text()
    expected, digest = alone(run)
    assert f"state {digest}" in run.logs()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        ("nn.utils.clip_grad_norm_(model.parameters(), 0.5)", (), ("job.clip_grad_norm_", "gradients of its stage")),
        ("model.step(batch['x'], target=batch['y'])", (), ("model.step() twice",)),
        ("sum(p.sum() for p in model.parameters()).backward()", (), ("backward() outside of model.step()",)),
        ("", ("--stages", "5"), ("cannot be cut into 5 parts",)),
    ],
    ids=["norm", "twice", "backward", "too-many"],
)
def test_what_a_stage_cannot_mean_of_the_model(
    run: PipelineRun, change: str, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    run.write(change=change, m=8)
    run.train(*(flags or ("--stages", "2")))
    run.refused(1, *words)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("workers", [1, 2])
def test_stages_are_killed_at_random_moments(run: PipelineRun, workers: int, seed: int) -> None:
    """From outside, whatever they are at: six times in a run."""
    draws = random.Random(seed)
    run.write(pause="0.05")
    run.train("--workers", str(workers), "--stages", "2", "--checkpoint-every", "4batches")
    for number in range(6):
        run.trained(run.batch * workers * draws.randrange(3 + 4 * number, 6 + 4 * number))
        leader = run.alive(Role.WORKER, draws.randrange(workers)).pid
        children = [pid for pid in processes_of(run.run_dir) if _parent(pid) == leader]
        victim = draws.choice([leader, *children])
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
    close_to_plain(run.finished(), workers * run.batch)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0
