"""Jobs that are all there at once and train in turns, a few seconds each, so that a slow minute hits all of them.

Each job's script has a *gate*, a file: it trains while the file is there. A window opens the gate, and is measured
from one lag later on, when flushes of what this window changed have begun. After it the gate is shut, and nobody trains
until the mirrors have had time to get what is left. So what a job owes to its mirrors is neither left to the next
window nor taken over from the one before. All jobs have the times of the one with the longest lag: a processor that has
rested seems to be faster for some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks._jobs import Job, Window, pushes
from benchmarks.throughput import CpuLog

LEAST_S = 3.0  # before a window is measured, and after it: right after another job, a job is slower


def watched(cpu: CpuLog, wait: Callable[[], object]) -> Window:
    """Return what the job of ``cpu`` used while ``wait`` waited."""
    cpu.poll()
    began_at = time.time()
    wait()
    cpu.poll()
    (_, all_before, ps_before), (_, all_after, ps_after) = cpu.rows[-2:]
    return Window(began_at, time.time(), all_after - all_before, ps_after - ps_before)


class TurnsJob:
    """One of the jobs. ``longest_lag_s``: how far mirrors of any of them may be behind; ``batch``: samples."""

    def __init__(
        self, home: Path, verb: Sequence[str], script: Sequence[str], longest_lag_s: float, batch: int
    ) -> None:
        self._gate = home / "gate"
        self._rest_s, self._batch = max(LEAST_S, longest_lag_s), batch
        self._windows: list[tuple[dict[str, float], Window]] = []
        self._protected = "--parity" in verb
        self.open()
        self.job = Job(home, list(verb), ["--", *script, "--gate", str(self._gate)], float("inf"))
        self._cpu = CpuLog([self.job.main])

    def __repr__(self) -> str:
        return f"<{self.job.run_dir}, {len(self._windows)} windows>"

    def open(self) -> None:
        """Let its workers train."""
        self._gate.touch()

    def shut(self) -> None:
        """Let its workers wait, and its mirrors get what is left."""
        with suppress(FileNotFoundError):
            self._gate.unlink()
        time.sleep(self._rest_s)

    def come_to_rest(self, samples: int, timeout_s: float) -> None:
        """Train so many samples, until mirrors are complete and two lags are over; then wait.

        RuntimeError if that takes too long."""
        self.job.until = time.monotonic() + timeout_s
        self.job.wait_for(lambda: self.job.samples_done() > samples and (not self._protected or self.job.safe()))
        time.sleep(2 * self._rest_s)
        self.shut()
        self.job.until = float("inf")

    def window(self, seconds: float) -> dict[str, float]:
        """Train for so many seconds. The figures are filled in by ``measure``."""
        figures: dict[str, float] = {}
        self.open()
        time.sleep(self._rest_s)
        self._windows.append((figures, watched(self._cpu, lambda: time.sleep(seconds))))
        self.shut()
        if self.job.over:
            raise RuntimeError(f"a job ended:\n{self.job.words()}")
        return figures

    def measure(self) -> None:
        """Fill in the figures of all windows."""
        at, samples = pushes(self.job.logs())
        for figures, window in self._windows:
            figures |= window.figures(at, samples, self._batch)

    def close(self) -> None:
        """End it."""
        self.job.close()


def windows(jobs: dict[str, TurnsJob], seconds: float) -> dict[str, Callable[[], dict[str, float]]]:
    """Return the sides of ``interleaved``: one window of each job."""
    return {name: partial(job.window, seconds) for name, job in jobs.items()}
