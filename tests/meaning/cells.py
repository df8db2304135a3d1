"""Computing cells: a row's script in a mode, beside the same script with plain PyTorch."""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import everstep
from everstep.api import job as api_job
from everstep.errors import ScriptError, UserError
from meaning import interrupted
from meaning.composed import Steps, steps_of
from meaning.plain import Plain
from meaning.table import Mode, Result, Row

SAME, STATED, REFUSED, OPEN = "same", "stated", "refused", "different (open)"
WORKER = Path(__file__).with_name("worker.py")
LAUNCH = WORKER.with_name("launch.py")
JOB_S = 300.0


@dataclass(frozen=True)
class Cell:
    """What a test showed. ``detail``: the sentence, the message of the refusal, or what differs."""

    verdict: str
    detail: str = ""


class Everstep:
    """The module ``everstep`` for a script that says nothing of the mode: ``join`` does."""

    plain = False

    def __init__(self, mode: Mode, run_dir: str | None = None) -> None:
        self._mode, self._run_dir, self.scale = mode, run_dir, mode.scale

    def join(self, **options: Any) -> Any:
        if self._run_dir is not None:
            options |= {"run_dir": self._run_dir, **self._mode.join}
        job = everstep.join(**options)
        if self._mode.name == "passes":
            loader = job.loader

            def halved(source: Any, batch_size: int, **given: Any) -> Any:
                return loader(source, batch_size, **{"largest_batch": -(-batch_size // 2), **given})

            job.loader = halved  # type: ignore[method-assign]
        return job

    def __getattr__(self, name: str) -> Any:
        return getattr(everstep, name)


_LOCK = threading.RLock()


@contextmanager
def _alone() -> Iterator[None]:
    """One script at a time in this process: random numbers and defaults of torch are everybody's."""
    with _LOCK:
        yield


@contextmanager
def _as_it_was() -> Iterator[None]:
    """What scripts and jobs change in this process is put back."""
    threads, default, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        job = api_job._job
        if job is not None and not job.closed:
            job.close()
        torch.set_num_threads(threads)
        torch.set_default_dtype(default)
        torch.set_grad_enabled(grad)


def plain(row: Row, mode: Mode, steps: Steps | None = None) -> Result:
    with _alone(), _as_it_was():
        return row.script(Plain(mode.scale, mode.ps, steps, **row.reference))


@functools.cache
def _plain(row: Row, scale: int, ps: bool) -> Result:
    return plain(row, Mode("", "", "", scale=scale, ps=ps))


def compute(row: Row, mode: Mode) -> Cell:
    """Run the row's script in ``mode`` and judge what it did."""
    try:
        got, steps = (alone(row, mode), None) if mode.alone else real(row, mode)
    except UserError as error:
        return Cell(REFUSED, str(error))
    except Exception as error:
        return Cell(OPEN, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
    if "refused" in got:  # in its first step or later: which samples it took until then says nothing
        steps = None
    wanted = _plain(row, mode.scale, mode.ps) if steps is None else plain(row, mode, steps)
    return judge(row, mode, got, wanted)


def judge(row: Row, mode: Mode, got: Result, wanted: Result) -> Cell:
    sentence = row.says(mode)
    if sentence is not None and not row.reference:
        return _sane(got, wanted) or Cell(STATED, sentence)
    for name, value in wanted.items():
        if name.startswith("each.") and not mode.iterations:
            continue
        wrong = _differs(got.get(name), value, row.rtol, row.atol)
        if wrong:
            return Cell(OPEN, f"{name}: {wrong}")
    return Cell(SAME) if sentence is None else Cell(STATED, sentence)


def _sane(got: Result, wanted: Result) -> Cell | None:
    """What even a stated difference may not be."""
    for name, value in wanted.items():
        if name.startswith("each."):
            continue
        found = got.get(name)
        if found is None or found.shape != value.shape:
            return Cell(OPEN, f"{name}: missing or of another shape")
        if found.dtype.kind == "f" and not np.isfinite(found).all() and np.isfinite(value).all():
            return Cell(OPEN, f"{name}: not finite")
    return None


def _differs(got: np.ndarray[Any, Any] | None, wanted: np.ndarray[Any, Any], rtol: float, atol: float) -> str:
    if got is None:
        return "missing"
    if got.shape != wanted.shape:
        return f"shape {got.shape} instead of {wanted.shape}"
    if got.dtype != wanted.dtype:
        return f"{got.dtype} instead of {wanted.dtype}"
    if wanted.dtype.kind in "US":
        return "" if (got == wanted).all() else "other text"
    if np.allclose(got, wanted, rtol, atol, equal_nan=True):
        return ""
    far = np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64))
    return f"off by {np.nanmax(far):.2g}"


def alone(row: Row, mode: Mode) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="meaning-", ignore_cleanup_errors=True) as folder,
        redirect_stdout(io.StringIO()),
        _as_it_was(),
    ):
        return row.script(Everstep(mode, f"{folder}/run"))


class JobFailedError(Exception):
    """A job of real processes ended without a result."""


def real(row: Row, mode: Mode) -> tuple[Result, Steps | None]:
    """The row in a job of real processes; the chief writes what the script returned."""
    folder = Path(tempfile.mkdtemp(prefix="meaning-"))
    try:
        out = folder / "out.npz"
        command = [sys.executable, "-X", "fork", str(LAUNCH), "run", "--no-display", "--run-dir", str(folder / "run")]
        command += [*mode.flags, str(WORKER), row.name, mode.name, str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **mode.environment}
        if row.interrupt:
            done = interrupted.run(command, row.interrupt, folder, environment, JOB_S)
        else:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=JOB_S, check=False
            )
        refused = out.with_suffix(".refused")
        if refused.exists():
            raise ScriptError(refused.read_text())
        if done.returncode != 0 or not out.exists():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("everstep: ")]
            raise JobFailedError(f"exit {done.returncode}: {lines[-1] if lines else done.stdout[-300:]}")
        with np.load(out, allow_pickle=False) as found:
            return dict(found), (steps_of(folder) or None) if mode.composed else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
