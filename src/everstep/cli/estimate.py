"""Runs ``everstep estimate``: it probes a script for some seconds and says what size its job should have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import psutil

from everstep.cli.probe_job import ProbeAsk, declared_mode, run_probe
from everstep.cli.view_text import clock, count
from everstep.config.load import check_script
from everstep.config.parity import parse_code
from everstep.errors import ConfigError, EverstepError
from everstep.monitor.job_history import args_digest, script_digest, user_history
from everstep.monitor.process_readings import hardware_class
from everstep.sizing.growing_tables import filled_samples, of_whole_job, rows_matter, rows_per_sample
from everstep.sizing.past_jobs import (
    MemoryLesson,
    Similar,
    as_probes,
    memory_lessons,
    similar_jobs,
    with_history,
    with_lessons,
)
from everstep.sizing.probe_readings import ProbeRun
from everstep.sizing.size_choice import Estimated, Estimator, Sizing, Wishes, check_wishes
from everstep.units import human_bytes, seconds, size_bytes

MODES = ("ps", "allreduce", "pipeline")
WINDOW_S = 3.0
PROBED_PS = 4
SCAN_S = 30.0


class EstimateFlags(NamedTuple):
    """Has the flags of the command as they were given; None: not given."""

    mode: str | None = None
    workers: int | None = None
    ps: int | None = None
    stages: int | None = None
    parity: str = "0"
    max_workers: int = 0
    max_ps: int = 0
    machines: int = 1
    cores: int | None = None
    memory: str | None = None
    price: float = 0.0
    budget: float = 0.0
    deadline: str | None = None
    epochs: int = 0
    limit: str = "120s"
    scan: str = "30s"
    batch: int | None = None


def estimate(command: Sequence[str], flags: EstimateFlags, as_json: bool, no_run: bool) -> None:
    """Print the estimate of a script, which is probed before. Raises ConfigError, ScriptError, PlatformError."""
    if not command:
        raise ConfigError("no script: everstep estimate train.py [ARGS]")
    script = check_script(command[0])
    wishes = wishes_of(flags, declared_mode(script))
    similar, lessons, trouble = earlier_jobs(script, tuple(command[1:]), wishes, flags.stages or 1)
    if trouble and not as_json:
        click.echo(f"everstep: {trouble}", err=True)
    if no_run:
        probes, sizing = from_history(script, similar, flags, wishes, trouble)
        show(with_lessons(sizing, lessons), probes, as_json)
        return
    if not as_json:
        click.echo(
            f"everstep: {script.name} runs up to its loop, and trains there for some seconds: it may download, log or "
            "write files; --no-run keeps it from running",
            err=True,
        )
    probes = probe_all(script, tuple(command[1:]), flags, wishes)
    show(with_lessons(with_history(Estimator(probes, wishes).sizing(), similar), lessons), probes, as_json)


def show(sizing: Sizing, probes: tuple[ProbeRun, ...], as_json: bool) -> None:
    """Print an estimate."""
    if as_json:
        click.echo(msgspec.json.encode({"estimate": sizing, "probes": probes}).decode())
        return
    for line in lines(sizing, probes):
        click.echo(line)


def earlier_jobs(
    script: Path, args: tuple[str, ...], wishes: Wishes, stages: int
) -> tuple[list[Similar], list[MemoryLesson], str]:
    """Return the jobs of the history that are like this one, what they have taught of memory, and one line if the
    history cannot be used."""
    history = user_history()
    if history is None:
        return [], [], ""
    digest = script_digest(script)
    try:
        kept = history.jobs(digest)
    except EverstepError as error:
        return [], [], str(error)
    like = digest, args_digest(args), wishes.mode
    return similar_jobs(kept, *like, hardware_class(), stages), memory_lessons(kept, *like), ""


def from_history(
    script: Path, similar: list[Similar], flags: EstimateFlags, wishes: Wishes, trouble: str
) -> tuple[tuple[ProbeRun, ...], Sizing]:
    """Return the estimate that earlier jobs alone give. Raises ConfigError where there are none."""
    probes, used = as_probes(similar, flags.parity) if similar else ([], [])
    if not probes:
        why = trouble or "the history has no job of this script, mode and parity that ended well"
        raise ConfigError(f"--no-run: {script.name}: {why}; run it once with everstep run, or leave --no-run out")
    sizing = Estimator(tuple(probes), wishes).sizing()
    notes = (*sizing.notes, *(f"history: from {one}" for one in used))
    return tuple(probes), msgspec.structs.replace(sizing, notes=notes)


def wishes_of(flags: EstimateFlags, declared: str) -> Wishes:
    """Return what is wished for. Raises ConfigError with one line."""
    mode = flags.mode or declared or "ps"
    if mode not in MODES:
        raise ConfigError(f"--mode {mode}: must be one of {', '.join(MODES)}")
    try:
        parity = parse_code(flags.parity)
    except ConfigError as error:
        raise ConfigError(f"--parity {flags.parity}: {error}") from None
    memory = float(size_bytes(flags.memory)) if flags.memory else 0.9 * psutil.virtual_memory().total
    ps = -1 if flags.ps is None and mode == "ps" else flags.ps or 0
    wishes = Wishes(
        mode=mode,
        workers=-1 if flags.workers is None else flags.workers,
        ps=ps,
        max_workers=flags.max_workers,
        max_ps=flags.max_ps,
        machines=flags.machines,
        memory_bytes=memory,
        price_usd_h=flags.price,
        deadline_s=seconds(flags.deadline) if flags.deadline else 0.0,
        budget_usd=flags.budget,
        parity=parity,
        epochs=flags.epochs,
    )
    check_wishes(wishes)
    stages = flags.stages or 1
    if stages > 1 and mode != "pipeline":
        raise ConfigError(f"--stages {stages} in mode {mode}: only a job of mode pipeline has stages")
    return wishes


def probe_all(script: Path, args: tuple[str, ...], flags: EstimateFlags, wishes: Wishes) -> tuple[ProbeRun, ...]:
    """Run the probes, one after the other; the first one counts keys, too. Where one made far more rows than the job
    will for a sample, another one of its size measures over rows that are there."""
    cores = flags.cores or os.cpu_count() or 1
    words = ["--mode", wishes.mode] if wishes.mode != "ps" else []
    stages = flags.stages or 1
    if wishes.mode == "pipeline":
        words += ["--stages", str(stages)]
    (workers, ps), *more = probed_sizes(wishes, cores)
    limit_s = seconds(flags.limit)
    base = ProbeAsk(script, args, tuple(words), workers, ps, cores, WINDOW_S, seconds(flags.scan), limit_s, stages)
    fresh = [run_probe(base), *(run_probe(base._replace(workers=w, ps=p, scan_s=0.0)) for w, p in more)]
    first = fresh[0].script
    job_rows = rows_per_sample(first.tables, first.samples * (wishes.epochs or first.epochs))
    found = []
    for probe in fresh:
        if rows_matter(probe, job_rows):
            again = base._replace(workers=probe.workers, ps=probe.ps, scan_s=0.0, first=filled_samples(probe))
            probe = of_whole_job(probe, run_probe(again), job_rows)
        found.append(probe)
    return tuple(found)


def probed_sizes(wishes: Wishes, cores: int) -> list[tuple[int, int]]:
    """Return the workers and ps of each probe: one of each (no ps in a mode without them); then, where a machine can
    have two workers, two of each, or so many ps as were asked for, up to ``PROBED_PS``."""
    ps = 1 if wishes.has_ps else 0
    workers = 2 if cores >= 2 and wishes.workers != 1 and wishes.max_workers != 1 else 1
    second = workers, min(wishes.ps, PROBED_PS) if wishes.ps > 0 else workers * ps
    return [(1, ps)] if second == (1, ps) else [(1, ps), second]


# ------------------------------------------------------------ words


def lines(sizing: Sizing, probes: tuple[ProbeRun, ...]) -> list[str]:
    """Return the estimate for a person."""
    size, figures = sizing.size, sizing.figures
    out = [f"estimate for mode {sizing.mode}: {size.workers} workers, {size.ps} ps, {size.threads} threads a worker"]
    width = max(map(len, figures))
    for name, figure in figures.items():
        out.append(f"  {name.replace('_', ' '):{width}}  {shown(figure):30}  {figure.reason}")
    script = probes[0].script
    for table in script.tables:
        if table.dense:
            continue
        keys = table.keys
        if table.fixed:
            rows = f"{count(table.fixed)} rows, uploaded"
        elif keys.whole:
            rows = f"{count(keys.likely)} rows: all {count(keys.seen)} samples were read in {script.scan_s:.1f} s" + (
                f", counted by a sketch (+- {100 * (keys.high / keys.likely - 1):.1f} %)" if keys.sketched else ""
            )
        else:
            span = f"{count(keys.low)} .. {count(keys.high)}"
            rows = (
                f"{count(keys.likely)} rows ({span}): {count(keys.seen)} of {count(keys.total)} samples were read in "
            )
            rows += f"{script.scan_s:.1f} s"
        row_bytes = 8 + 4 * (table.dim + table.state + table.meta)
        out.append(f"  table {table.name}: {rows}; {row_bytes} bytes a row with optimizer state")
    if script.window_samples and (script.bytes_out or script.bytes_in):
        each = (script.bytes_out + script.bytes_in) / script.window_samples
        out.append(f"  to and from the ps: {human_bytes(each)} a sample; in all {count(each * size.samples_per_s)} B/s")
    if script.read_samples_per_s:
        out.append(f"  reading alone: {count(script.read_samples_per_s)} samples/s a worker")
    out.append(f"what binds: {sizing.binding}: {sizing.why}")
    out += [f"note: {note}" for note in sizing.notes]
    return out


def shown(figure: Estimated) -> str:
    """Return a figure with its error bar."""
    if figure.unit == "bytes":
        return f"{human_bytes(figure.value)} ({human_bytes(figure.low)} .. {human_bytes(figure.high)})"
    if figure.unit == "s":
        return f"{clock(figure.value)} ({clock(figure.low)} .. {clock(figure.high)})"
    if figure.unit == "USD":
        return f"{figure.value:.4g} USD ({figure.low:.4g} .. {figure.high:.4g})"
    if figure.low == figure.high:
        return f"{figure.value:g} {figure.unit}"
    return f"{count(figure.value)} {figure.unit} ({count(figure.low)} .. {count(figure.high)})"
