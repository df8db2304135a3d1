"""Runs ``everstep suspend``, and what makes a suspended job go on: ``unsuspend``, or capacity that is back."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from everstep.agent.rundir import RunDirLock, in_use, remove_sockets
from everstep.brain.events import SuspendAsked
from everstep.cli.display import JobSummary, read_summary
from everstep.cli.link import ask_master, ask_view
from everstep.cli.status import is_suspended, need_running
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError, StorageError, UserError
from everstep.model.job_view import SupervisionView
from everstep.platforms.fleet_runner import FleetRunner
from everstep.policies.waits import Steadiness, machines_needed, stabilization_s
from everstep.storage.places import open_place
from everstep.storage.suspended_job import (
    INDEX,
    fetch_suspended,
    keep_suspended,
    mark_taken,
    read_suspended,
    where_words,
)
from everstep.storage.suspension import UNSUSPEND_FILE, Unsuspension, read_unsuspension, write_unsuspension

LOOK_S = 0.2
SUSPEND_MAX_S = 180.0  # a checkpoint of 60 s, and what ends before and after it
BY_HAND = "everstep unsuspend"


def suspend(run_dir: Path) -> None:
    """Ask the master to suspend its job, and wait until it is. Raises ConfigError: it does not run; UserError: its
    state could not be made safe."""
    need_running(run_dir)
    before = ask_view(run_dir).supervision
    ask_master(run_dir, SuspendAsked("everstep suspend", suspensions=before.suspensions if before else 0))
    click.echo("the job is being suspended: workers finish their batch, and a checkpoint is written")
    end = time.monotonic() + SUSPEND_MAX_S
    while time.monotonic() < end:
        if not in_use(run_dir) or is_suspended(run_dir):
            break
        try:
            view = ask_view(run_dir)
        except EverstepError:
            time.sleep(LOOK_S)  # (its master ends, or comes back)
            continue
        if view.exit_code is None and _gave_up(view.supervision, before):
            raise UserError(
                f"run directory {run_dir}: the job could not be suspended, and goes on: everstep explain says why"
            )
        time.sleep(LOOK_S)
    summary = read_summary(run_dir)
    if summary is not None and summary.is_suspended:
        click.echo(f"suspended; everstep unsuspend {run_dir} goes on")
        return
    how = f"it is {summary.phase}" if summary is not None else f"it has not ended within {SUSPEND_MAX_S:.0f} s"
    raise UserError(f"run directory {run_dir}: the job is not suspended: {how}")


def _gave_up(now: SupervisionView | None, before: SupervisionView | None) -> bool:
    """Whether the job was asked to be suspended, and goes on."""
    if now is None or now.suspending:
        return False
    return before is None or now.suspensions == before.suspensions


class MovedTo(NamedTuple):
    """Is where a job goes on that was suspended on another machine; "": as it was there, or a new run directory."""

    run_dir: str = ""
    script: str = ""
    bind: str = ""


def unsuspend(source: str | Path, live: bool, budget: float | None = None, moved: MovedTo | None = None) -> int:
    """Have a suspended job go on, here; the exit code of ``everstep``. ``source``: its run directory, or the place of
    its checkpoints. If an ``everstep run`` waits for capacity, it goes on there. ``budget``: USD, in place of the job's
    own. Raises ConfigError: the job is not suspended, or would be again at once."""
    from everstep.cli.run import home_files, run_terms
    from everstep.config.load import check_script, read_spec

    moved = moved if moved is not None else MovedTo()
    if is_place(str(source)):
        return _unsuspend_from(str(source), live, budget, moved)
    if any(moved):
        raise ConfigError(
            f"run directory {source}: the job goes on there, as it was; --run-dir, --script and --bind are for the URL "
            "of its checkpoints"
        )
    run_dir = Path(source)
    spec = read_spec(run_dir)
    summary = read_summary(run_dir)
    if in_use(run_dir):
        if summary is None or not summary.is_suspended:
            raise ConfigError(f"run directory {run_dir}: this job is running")
        if budget is not None:
            raise ConfigError(
                f"run directory {run_dir}: its everstep run waits for capacity: end it, then give --budget"
            )
        write_unsuspension(run_dir, Unsuspension(number=summary.suspensions, reason=BY_HAND))
        click.echo("the job goes on where everstep run waits for capacity")
        return 0
    if summary is None or not summary.is_suspended:
        how = f"it is {summary.phase}" if summary is not None else "it ended without a word"
        raise ConfigError(
            f"run directory {run_dir}: the job is not suspended, {how}; everstep resume {run_dir} begins a new run "
            "from its newest checkpoint"
        )
    check_script(spec.script)
    with RunDirLock.take(run_dir):
        remove_sockets(run_dir)
        spec = with_budget(spec, run_dir, summary, budget)
        take_here(spec, run_dir, summary.suspensions)
        go_on(run_dir, summary.suspensions, BY_HAND)
        spec, files = home_files(spec, run_dir)
        return run_terms(spec, run_dir, live, lambda: None, files)


def is_place(source: str) -> bool:
    """Return whether a suspended job is to be looked for among checkpoints, not in a run directory."""
    if "://" in source:
        return True
    path = Path(source)
    return not (path / "job.json").exists() and (path / INDEX).exists()


def _unsuspend_from(url: str, live: bool, budget: float | None, moved: MovedTo) -> int:
    """Have a job go on here that was suspended on another machine."""
    from everstep.cli.run import absolute, home_files, refuse_used, run_terms
    from everstep.config.load import new_run_dir, read_origins, read_spec, save_spec

    place = open_place(absolute(url))
    index = read_suspended(place)
    if index is None:
        raise ConfigError(
            f"{url}: no suspended job is kept there; everstep resume {url} begins a new run from its newest checkpoint"
        )
    if index.taken is not None:
        raise ConfigError(f"{url}: this job is not suspended any more: {where_words(index)}")
    run_dir = Path(absolute(moved.run_dir)) if moved.run_dir else new_run_dir(index.job)
    with RunDirLock.take(run_dir):
        refuse_used(run_dir)
        for file in index.files:
            (run_dir / file.path).unlink(missing_ok=True)  # (of an attempt that did not get as far as this one)
        try:
            fetch_suspended(place, index, run_dir)
            spec = _spec_here(read_spec(run_dir), run_dir, place.url, moved)
            summary = read_summary(run_dir)
            if summary is None or not summary.is_suspended or summary.suspensions != index.number:
                raise ConfigError(f"{url}: what is kept there is not of suspension {index.number}")
            spec = with_budget(spec, run_dir, summary, budget)
            spec, files = home_files(spec, run_dir)
            save_spec(run_dir, spec, {**read_origins(run_dir), "checkpoint_to": "everstep unsuspend"})
            mark_taken(place, index.number, run_dir)
        except BaseException:
            (run_dir / "job.json").unlink(missing_ok=True)  # (so that another attempt finds a new run directory)
            raise
        rest = "" if index.complete else "; its machine went before all audit logs were kept: everstep audit says which"
        click.echo(f"{index.job} goes on here, from {place.url}; it was suspended on {index.host}{rest}")
        go_on(run_dir, index.number, f"{BY_HAND}, on {socket.gethostname()}; before that on {index.host}")
        return run_terms(spec, run_dir, live, lambda: None, files)


def _spec_here(spec: JobSpec, run_dir: Path, url: str, moved: MovedTo) -> JobSpec:
    """Return the settings of the job as they are on this machine. Raises ConfigError."""
    from everstep.cli.run import absolute, absolute_endpoint
    from everstep.config.load import check_script, check_spec

    script = check_script(absolute(moved.script) if moved.script else spec.script)
    bind = absolute_endpoint(moved.bind) if moved.bind else spec.bind
    new = msgspec.structs.replace(
        spec, script=str(script), run_dir=str(run_dir), checkpoint_to=url, bind=bind, files_port=0
    )
    check_spec(new)
    return new


def take_here(spec: JobSpec, run_dir: Path, number: int) -> None:
    """The job goes on in its own run directory: nobody is to go on with what is kept beside its checkpoints. Raises
    ConfigError: somebody has."""
    if not spec.checkpoint_to:
        return
    try:
        place = open_place(spec.checkpoint_to)
        mark_taken(place, number, run_dir)
    except StorageError as error:
        click.echo(f"everstep: {error}: take care that the job does not go on elsewhere, too", err=True)


def keep_elsewhere(spec: JobSpec, run_dir: Path, summary: JobSummary) -> None:
    """A job is suspended: keep beside its checkpoints what it needs to go on on another machine, if they are not on
    this one alone."""
    if not spec.checkpoint_to:
        return
    try:
        place = open_place(spec.checkpoint_to)
        keep_suspended(place, run_dir, spec.name, summary.suspensions)
    except EverstepError as error:
        click.echo(
            f"everstep: journal and secret are not kept at {spec.checkpoint_to}: {error}; the job goes on from "
            f"{run_dir} only",
            err=True,
        )
        return
    click.echo(
        f"journal and secret are kept there, too: everstep unsuspend {spec.checkpoint_to} goes on on any machine"
    )


def with_budget(spec: JobSpec, run_dir: Path, summary: JobSummary, budget: float | None) -> JobSpec:
    """Return the spec with another budget, and leave it in the run directory. Raise ConfigError: the job was suspended
    for its budget, and no larger one is given; or the budget is none."""
    from everstep.config.load import check_spec, read_origins, save_spec

    new = spec if budget is None else msgspec.structs.replace(spec, budget=budget)
    check_spec(new)
    if summary.budget_asked and 0 < new.budget <= spec.budget:
        raise ConfigError(
            f"run directory {run_dir}: {summary.spent_usd or 0.0:.4f} USD of budget={spec.budget:g} are spent: give a "
            "larger one, everstep unsuspend RUN_DIR --budget USD (0: any sum)"
        )
    if new is not spec:
        save_spec(run_dir, new, {**read_origins(run_dir), "budget": "everstep unsuspend --budget"})
    return new


def go_on(run_dir: Path, number: int, reason: str) -> None:
    """Leave word for the next master that suspension ``number`` is over. With the run directory locked."""
    write_unsuspension(run_dir, Unsuspension(number=number, reason=reason))
    (run_dir / "summary.json").unlink(missing_ok=True)


def wait_for_capacity(spec: JobSpec, run_dir: Path, number: int, fleet: FleetRunner) -> str:
    """Wait until enough machines could be had for long enough, or ``everstep unsuspend`` says so; return why the job
    goes on."""
    (run_dir / UNSUSPEND_FILE).unlink(missing_ok=True)
    need = machines_needed(spec)
    back = Steadiness(need, stabilization_s(spec))
    click.echo(f"waiting for {need} machines, for {spec.stabilization} (everstep unsuspend {run_dir}: go on now)")
    while True:
        asked = read_unsuspension(run_dir)
        if asked is not None and asked.number == number:
            return asked.reason
        there = fleet.on_offer()
        if back.offered(time.monotonic(), there):
            return f"capacity is back: {there} machines could be had for {spec.stabilization}"
        time.sleep(max(LOOK_S, fleet.every_s))
