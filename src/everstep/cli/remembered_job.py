"""Makes the record of a job for the history of its user, and writes it when the job has ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.config.spec import JobSpec
from everstep.errors import EverstepError
from everstep.model.job_view import JobView
from everstep.monitor.job_history import args_digest, script_digest, user_history
from everstep.monitor.process_readings import clean_hardware, hardware_class
from everstep.sizing.past_jobs import PastJob


class SeenJob:
    """Gathers from views of a running job what its summary does not say: peaks of memory, and when it trained."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.workers = self.ps = 0
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def __repr__(self) -> str:
        return f"<SeenJob {self.workers} workers, {self.ps} ps, {self.rate[0]:,.0f} samples/s>"

    def see(self, view: JobView) -> None:
        """Take one view. Any thread, one at a time."""
        for member in view.members:
            self.peaks[member.role] = max(self.peaks.get(member.role, 0), member.peak_bytes, member.rss_bytes)
        self.workers = max(self.workers, sum(m.role == "worker" and m.up for m in view.members))
        self.ps = max(self.ps, sum(m.role == "ps" and m.up for m in view.members))
        if view.samples_done <= 0:
            return
        if self._first is None:
            self._first = view.at, view.samples_done
        if self._last is None or view.samples_done > self._last[1]:
            self._last = view.at, view.samples_done

    @property
    def rate(self) -> tuple[float, float]:
        """Return samples/s while it trained, and the seconds that this was seen; (0, 0): too short to tell."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return 0.0, 0.0
        seconds = self._last[0] - self._first[0]
        return (self._last[1] - self._first[1]) / seconds, seconds


def record_of(spec: JobSpec, summary: Mapping[str, Any], seen: SeenJob, at: float) -> PastJob:
    """Return the record of a job that has ended. ``summary``: of summary.json."""
    rate, training_s = seen.rate
    model = summary.get("model") or {}
    peaks = {str(role): int(n_bytes) for role, n_bytes in (summary.get("peaks") or {}).items()}

    def peak(role: str) -> int:
        """Return the peak of a role; its last beat, after the model was written, only the master has seen."""
        return max(seen.peaks.get(role, 0), peaks.get(role, 0))

    numbers = ("steps", "generations", "steps_void", "batches_retried", "suspensions", "checkpoint")
    came = {name: float(summary.get(name) or 0) for name in numbers}
    return PastJob(
        at=at,
        name=spec.name,
        script=Path(spec.script).name,
        script_id=script_digest(Path(spec.script)),
        args_id=args_digest(spec.args),
        mode=spec.mode,
        workers=spec.workers,
        ps=spec.ps,
        stages=spec.stages,
        parity=spec.parity,
        consistency=spec.consistency,
        hardware=clean_hardware(spec.hardware) or hardware_class(),
        cores=os.cpu_count() or 1,
        phase=str(summary.get("phase", "")),
        exit_code=int(summary.get("exit_code") or 0),
        samples=int(summary.get("samples_done") or 0),
        epochs=int(summary.get("epochs") or 1),
        wall_s=float(summary.get("wall_s") or 0.0),
        training_s=training_s,
        samples_per_s=rate or float(summary.get("samples_per_s") or 0.0),
        worker_peak_bytes=peak("worker"),
        ps_peak_bytes=peak("ps"),
        master_peak_bytes=peak("master"),
        model_bytes=sum(model.get("files", {}).values()),
        failures={str(k): int(v) for k, v in (summary.get("failures") or {}).items()},
        planned={"workers": spec.workers, "ps": spec.ps, "budget": spec.budget},
        came={**came, "workers": seen.workers, "ps": seen.ps},
        spent_usd=summary.get("spent_usd"),
        too_small={str(role): int(died[1]) for role, died in (summary.get("too_small") or {}).items()},
        memory={str(role): int(size[1]) for role, size in (summary.get("sizes") or {}).items() if size[1]},
    )


def remember_job(spec: JobSpec, run_dir: Path, seen: SeenJob, environment: Mapping[str, str] = os.environ) -> str:
    """Write the record of a job that has ended. Return "", or one line if the history cannot be used: the job has ended
    as it has."""
    history = user_history(environment)
    if history is None:
        return ""
    try:
        summary = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        return ""  # it ended without a summary: nothing was trained, or it says so itself
    try:
        history.add(record_of(spec, summary, seen, time.time()))
    except EverstepError as error:
        return f"{error}: this job is not remembered"
    return ""
