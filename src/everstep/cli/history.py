"""Runs ``everstep history``: the jobs that this user's history remembers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import msgspec

from everstep.cli.view_text import clock, count, failures_text
from everstep.errors import ConfigError, escaped
from everstep.monitor.job_history import VARIABLE, JobHistory, user_history
from everstep.sizing.past_jobs import KeptJob, PastJob
from everstep.units import human_bytes

_SHOWN = 30


def the_history() -> JobHistory:
    """Return the history. Raises ConfigError where none is kept."""
    history = user_history()
    if history is None:
        raise ConfigError(f"{VARIABLE}=off: no history is kept; name a file, or unset it")
    return history


def show(numbers: Sequence[int], as_json: bool, limit: int = _SHOWN) -> None:
    """Print these jobs, or the newest. Raises ConfigError for a number that there is not."""
    history = the_history()
    jobs = history.jobs()
    chosen = [one_of(jobs, n) for n in numbers] if numbers else jobs[-limit:]
    if as_json:
        click.echo(msgspec.json.encode([{"number": k.number, **msgspec.to_builtins(k.job)} for k in chosen]).decode())
        return
    if not chosen:
        click.echo(f"no jobs in {history.path}")
        return
    if numbers:
        for kept in chosen:
            click.echo("\n".join(detail_lines(kept)))
        return
    for line in list_lines(chosen):
        click.echo(line)
    if len(jobs) > len(chosen):
        click.echo(f"({len(jobs) - len(chosen)} older ones: --limit {len(jobs)})")


def compare(first: int, second: int) -> None:
    """Print two jobs side by side."""
    jobs = the_history().jobs()
    a, b = one_of(jobs, first), one_of(jobs, second)
    rows = [("", f"job {a.number}", f"job {b.number}", "ratio")]
    for name, words in _facts(a.job).items():
        left, right = words, _facts(b.job)[name]
        rows.append((name, left, right, _ratio(a.job, b.job, name)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def forget(numbers: Sequence[int], everything: bool) -> None:
    """Remove jobs from the history."""
    if everything == bool(numbers):
        raise ConfigError("everstep history forget: give numbers of jobs, or --all")
    history = the_history()
    if numbers:
        jobs = history.jobs()
        for number in numbers:
            one_of(jobs, number)
    click.echo(f"{count(history.forget(None if everything else numbers))} jobs forgotten")


def one_of(jobs: Sequence[KeptJob], number: int) -> KeptJob:
    """Return the record of that number. Raises ConfigError."""
    for kept in jobs:
        if kept.number == number:
            return kept
    raise ConfigError(f"job {number}: not in the history; everstep history lists the numbers")


def list_lines(jobs: Sequence[KeptJob]) -> list[str]:
    """Return a line for each job."""
    rows = [("number", "ended", "job", "mode", "workers", "ps", "samples/s", "took", "worker", "ps", "end")]
    for number, job in jobs:
        peaks = human_bytes(job.worker_peak_bytes), human_bytes(job.ps_peak_bytes) if job.ps else "-"
        speed = count(job.samples_per_s), clock(job.wall_s)
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.at))
        name, end = escaped(job.name, 40), escaped(job.phase, 20)
        rows.append((str(number), ended, name, job.mode, str(job.workers), str(job.ps), *speed, *peaks, end))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def detail_lines(kept: KeptJob) -> list[str]:
    """Return all of a record."""
    facts = _facts(kept.job)
    width = max(map(len, facts))
    return [f"job {kept.number}", *(f"  {name:{width}}  {words}" for name, words in facts.items())]


_NUMBERS = {
    "samples": "samples",
    "samples/s": "samples_per_s",
    "took": "wall_s",
    "peak of a worker": "worker_peak_bytes",
    "peak of a ps": "ps_peak_bytes",
    "model": "model_bytes",
}


def _facts(job: PastJob) -> dict[str, str]:
    failures, died = failures_text(job.failures) or "none", job.too_small
    return {
        "name": escaped(job.name, 60),
        "script": f"{escaped(job.script, 60)} ({job.script_id[:8]})",
        "arguments": job.args_id[:8],
        "ended": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.at)),
        "mode": job.mode if job.stages == 1 else f"{job.mode}, {job.stages} stages",
        "workers": f"{job.workers} (at most {job.came.get('workers', 0):.0f})",
        "ps": f"{job.ps} (at most {job.came.get('ps', 0):.0f})",
        "parity": job.parity,
        "machine": f"{escaped(job.hardware, 80)}, {job.cores} cores",
        "samples": count(job.samples),
        "samples/s": count(job.samples_per_s),
        "took": clock(job.wall_s),
        "peak of a worker": human_bytes(job.worker_peak_bytes),
        "peak of a ps": human_bytes(job.ps_peak_bytes),
        "model": human_bytes(job.model_bytes),
        "failures": failures,
        "died of memory": ", ".join(f"a {r} of {human_bytes(n)}" for r, n in died.items()) or "none",
        "end": f"{escaped(job.phase, 20)} ({job.exit_code})",
    }


def _ratio(a: PastJob, b: PastJob, name: str) -> str:
    if name not in _NUMBERS:
        return ""
    left, right = float(getattr(a, _NUMBERS[name])), float(getattr(b, _NUMBERS[name]))
    return f"{right / left:.2f}" if left and right else ""
