"""Third-party models in jobs of several processes that are killed at work, beside plain PyTorch.

``python tests/meaning/third_party_jobs.py`` runs them, records ``third_party.json`` and writes ``docs/third-party.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from everstep.agent.rundir import in_use
from everstep.cli.link import ask_master
from everstep.errors import EverstepError
from everstep.model.job_view import JobView
from everstep.model.member import Role
from everstep.monitor.audit import audit
from everstep.net.messages import GetStatus
from meaning import third_party
from meaning.cells import LAUNCH, _alone, _as_it_was
from meaning.curves import Curves, compare, windows, within_spread
from meaning.plain import Plain
from meaning.third_party import MODELS, Run

RECORD = Path(__file__).with_name("third_party.json")
PAGE = Path(__file__).parents[2] / "docs" / "third-party.md"
WORKER = Path(__file__).with_name("third_party_worker.py")
POINTS = 12
SAME = 2.0  # standard deviations of plain PyTorch over the seeds
JOB_S = 400.0
MODES = {
    "allreduce": ("--mode", "allreduce", "--workers", "2", "--strategy", "fixed"),
    "ps": ("--workers", "2", "--ps", "2", "--parity", "1+1"),
}


@dataclass(frozen=True)
class Curve:
    """One run. ``killed``: what, e.g. "worker:1 after 17 batches"."""

    losses: list[float]
    metric: float
    killed: str = ""


class JobFailedError(Exception):
    """A job ended without a result; or it was refused (then its text is the refusal's)."""


@dataclass(frozen=True)
class Note:
    pid: int
    slot: int
    step: int
    row: int
    n: int
    loss: float


def notes_of(path: Path) -> list[Note]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        words = line.split()
        if len(words) == 6:  # (a process that is killed may leave half a line)
            found.append(Note(*map(int, words[:5]), float(words[5])))
    return found


def loss_curve(notes: list[Note], by_step: bool) -> Curves:
    """``by_step``: an iteration that was done again for the same samples of the same step counts once."""
    if by_step:
        notes = sorted({(n.step, n.row): n for n in notes}.values(), key=lambda n: n.step)
    return windows([n.loss for n in notes], [n.n for n in notes], POINTS)


def plain(name: str, mode: str, seed: int, too_large: float = 0.0) -> Curve:
    with tempfile.TemporaryDirectory(prefix="third-party-") as folder, _alone(), _as_it_was():
        third_party.RUN = Run(seed, Path(folder) / "curve", too_large)
        try:
            result = MODELS[name].script(Plain(ps=mode == "ps", seed=seed))
        finally:
            third_party.RUN = Run()
        notes = notes_of(Path(folder) / "curve")
    return Curve(loss_curve(notes, True).tolist(), float(result["metric"]), str(len(notes)))


class Killer(threading.Thread):
    """Kills what ``plan`` says, at moments that are drawn: after some batches, and then in the middle of something."""

    def __init__(self, notes: Path, run_dir: Path, mode: str, iterations: int, seed: int) -> None:
        super().__init__(daemon=True)
        rng = random.Random(f"{mode} {seed}")
        self._notes, self._run_dir = notes, run_dir
        self._plan = [("worker", rng.randrange(2), rng.randint(2, max(3, iterations * 6 // 10)), rng.uniform(0, 0.05))]
        if mode == "ps":
            self._plan.append(
                ("ps", rng.randrange(2), rng.randint(2, max(3, iterations * 8 // 10)), rng.uniform(0, 0.05))
            )
        self._plan.sort(key=lambda one: one[2])
        self.killed: list[str] = []
        self.over = False

    def run(self) -> None:
        for role, slot, after, more_s in self._plan:
            while not self.over:
                notes = notes_of(self._notes)
                if len(notes) >= after:
                    time.sleep(more_s)
                    pid = self._pid(role, slot, notes)
                    if pid:
                        try:
                            os.kill(pid, signal.SIGKILL)
                        except ProcessLookupError:
                            break
                        self.killed.append(f"{role}:{slot} after {len(notes_of(self._notes))} batches")
                        break
                time.sleep(0.002)

    def _pid(self, role: str, slot: int, notes: list[Note]) -> int:
        if role == "worker":
            return next((n.pid for n in reversed(notes) if n.slot == slot), 0)
        if not in_use(self._run_dir):
            return 0
        try:
            status = ask_master(self._run_dir, GetStatus(), timeout_s=5.0)
        except (EverstepError, OSError):
            return 0
        assert isinstance(status, JobView)
        return next((m.pid for m in status.members if (m.role, m.slot, m.state) == (Role.PS, slot, "alive")), 0)


def job(name: str, mode: str, seed: int, iterations: int, kill: bool = True, too_large: float = 0.0) -> Curve:
    """``iterations``: of plain PyTorch. Raises JobFailedError."""
    folder = Path(tempfile.mkdtemp(prefix="third-party-"))
    out, run_dir = folder / "out", folder / "run"
    notes, refused, metric = (Path(f"{out}.{what}") for what in ("curve", "refused", "metric"))
    # Every other job waits for the worker's successor; in the others who is left does its part.
    waits = ["--min-workers", "2"] if mode == "allreduce" and seed % 2 else []
    command = [sys.executable, "-X", "fork", str(LAUNCH), "run", "--no-display", "--run-dir", str(run_dir)]
    command += [*MODES[mode], *waits, "--seed", str(seed), str(WORKER), name, str(out), str(seed), repr(too_large)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    killer = Killer(notes, run_dir, mode, iterations, seed)
    try:
        if kill:
            killer.start()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=JOB_S, check=False
        )
        killer.over = True
        if refused.exists():
            raise JobFailedError(refused.read_text())
        if done.returncode or not metric.exists():
            raise JobFailedError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        report = audit(run_dir)
        if not report.ok:
            raise JobFailedError(f"audit: {report}")
        curve = loss_curve(notes_of(notes), mode == "allreduce")
        return Curve(curve.tolist(), float(metric.read_text()), ", ".join(killer.killed))
    finally:
        killer.over = True
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Finding:
    """A model in a mode. ``refused``: the line that everstep ended with. ``spread``: how far curve and metric of all
    seeds are from plain PyTorch's, in its standard deviations over the seeds."""

    model: str
    mode: str
    seeds: int
    kills: list[str]
    plain_metric: list[float]
    metric: list[float]
    curve_spread: float
    metric_spread: float
    percent: float
    error: float
    least: float
    distance: float
    learns: bool
    refused: str = ""


def look(name: str, mode: str, seeds: range) -> Finding:
    plains, wrongs, got = [], [], []
    for seed in seeds:
        plains.append(plain(name, mode, seed))
        wrongs.append(plain(name, mode, seed, 0.01))
        try:
            got.append(job(name, mode, seed, int(plains[-1].killed)))
        except JobFailedError as error:
            return Finding(name, mode, 0, [], [], [], 0, 0, 0, 0, 0, 0, False, str(error))
    p, w, g = (np.array([c.losses for c in curves]) for curves in (plains, wrongs, got))
    metrics = [np.array([[c.metric] for c in curves]) for curves in (plains, got)]
    verdict = compare(p, w, g)
    return Finding(
        name,
        mode,
        len(seeds),
        [c.killed for c in got],
        [c.metric for c in plains],
        [c.metric for c in got],
        within_spread(p, g),
        within_spread(*metrics),
        verdict.percent,
        verdict.error,
        verdict.least,
        verdict.distance,
        bool(g[:, -2:].mean() < g[:, 0].mean()),
    )


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def record(found: dict[str, dict[str, Any]]) -> None:
    order = {f"{m} {mode}": i for i, (m, mode) in enumerate((m, mode) for m in MODELS for mode in MODES)}
    lines = [
        f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items(), key=lambda kv: order.get(kv[0], 999))
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


HEAD = """# Third-party models as a whole

Models from the package index, unchanged but for the documented lines (`job.sparse`, `job.replicate`, `job.optimizer`,
`job.loader`, `job.steps`), in jobs of several processes. In each a worker is killed (`kill -9`) at a moment drawn at
random; in mode ps, with `--parity 1+1`, a ps too. Beside each job the same script runs with plain PyTorch on one
process: same seed, same first weights, and in mode allreduce the same samples in each step. The page is made by
`python tests/meaning/third_party_jobs.py`; the data are the repository's own (flights, Fashion-MNIST, Shakespeare).

- **loss**: on data held out, at the end: mean over the seeds, and the standard deviation of plain PyTorch over them.
- **curve, metric**: how far the means over the seeds are from plain PyTorch's, in its standard deviations over the
  seeds. With three seeds, two means of the same distribution differ by 0.8 on average; up to 2 counts as the same.
- **gradient**: by how many per cent the gradients seem to be too large. It is measured along the curve of plain PyTorch
  with gradients 1 % too large, paired by seed; +- the standard error. A job without random numbers in the model shows
  it to 0.1 % or better, if all losses were noted: a process that is killed before it notes its loss leaves a gap in the
  curve. Dropout has other masks here, and mode ps is asynchronous: there the figure is noise, and the error says so.

Two workers; mode ps: two ps, asynchronous: a gradient is of weights that are up to a few steps old. Mode allreduce:
`--strategy fixed`. There, in jobs of odd seeds, training waits for the killed worker's successor (`--min-workers 2`);
in the others the worker that is left does all.
"""


def page(found: dict[str, dict[str, Any]]) -> str:
    lines = [HEAD, "| model | package | mode | loss: plain | everstep | curve | metric | gradient | kills |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    refused: list[str] = []
    for one in found.values():
        of = MODELS[one["model"]]
        begin = f"| `{one['model']}` | {of.package} | {one['mode']} |"
        if one["refused"]:
            refused.append(one["refused"])
            lines.append(f"{begin} refused [{len(refused)}] | | | | | |")
            continue
        p, e = np.array(one["plain_metric"]), np.array(one["metric"])
        kills = sum(len(k.split(", ")) for k in one["kills"] if k)
        beyond = " (beyond)" if max(one["curve_spread"], one["metric_spread"]) > SAME else ""
        lines.append(
            f"{begin} {p.mean():.4f} ({p.std(ddof=1):.4f}) | {e.mean():.4f} | {one['curve_spread']:.2f} | "
            f"{one['metric_spread']:.2f}{beyond} | {one['percent']:+.2f} % +- {one['error']:.2f} | {kills} |"
        )
    for number, line in enumerate(refused, 1):
        lines.append(f"\n[{number}] {line}")
    return "\n".join(lines) + "\n"


def main() -> None:
    from meaning.command import one_import

    parser = argparse.ArgumentParser(prog="python tests/meaning/third_party_jobs.py", description=__doc__)
    parser.add_argument("--models", default="", help="names, by commas (default: all)")
    parser.add_argument("--modes", default="", help="ps, allreduce (default: both)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--missing", action="store_true", help="only what is not recorded")
    parser.add_argument("--page", action="store_true", help="only write the page from what is recorded")
    given = parser.parse_args()
    found = recorded()
    if not given.page:
        models = [m for m in given.models.split(",") if m] or list(MODELS)
        with one_import():
            for name in models:
                for mode in [m for m in given.modes.split(",") if m] or MODES:
                    key = f"{name} {mode}"
                    if MODELS[name].missing() or (given.missing and key in found):
                        continue
                    begin = time.monotonic()
                    one = asdict(look(name, mode, range(1, given.seeds + 1)))
                    print(key, one, f"{time.monotonic() - begin:.0f} s", flush=True)
                    found[key] = one
                    record(found)
    PAGE.write_text(page(recorded()))


if __name__ == "__main__":
    main()
