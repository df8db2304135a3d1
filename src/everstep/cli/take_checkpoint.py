"""Runs ``everstep checkpoint take RUN_DIR``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from everstep.agent.rundir import in_use
from everstep.brain.events import CheckpointAsked, CheckpointBegun, Refused
from everstep.cli.link import ask_master, ask_view
from everstep.cli.rundirs import open_run_dir
from everstep.errors import ConfigError, DeadlineError, EverstepError, PlatformError, UserError
from everstep.model.job_view import CheckpointView
from everstep.model.reasons import CheckpointReason
from everstep.units import human_bytes

POLL_S = 0.1
WAIT_S = 1800.0


def take_checkpoint(run_dir: Path, full: bool, wait: bool) -> None:
    """Raises UserError with the master's reason if it refuses, PlatformError if the checkpoint came to nothing."""
    open_run_dir(run_dir)
    if not in_use(run_dir):
        raise ConfigError(f"run directory {run_dir}: this job is not running")
    answer = ask_master(run_dir, CheckpointAsked(CheckpointReason.ASKED, full))
    if isinstance(answer, Refused):
        raise UserError(answer.error)
    assert isinstance(answer, CheckpointBegun)
    number = answer.checkpoint
    if not wait:
        click.echo(f"checkpoint {number} has begun")
        return
    status = _wait(run_dir, number)
    kind = "incremental" if status.incremental else "full"
    click.echo(f"checkpoint {number}: {kind}, {human_bytes(status.bytes_written)} in {status.took_s:.1f} s")


def _wait(run_dir: Path, number: int) -> CheckpointView:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            found = ask_view(run_dir).checkpoint
        except EverstepError:
            if not in_use(run_dir):
                raise PlatformError(f"the job ended before checkpoint {number} was complete") from None
            raise
        if found is not None and found.newest >= number:
            return found
        if found is not None and found.writing != number:
            raise PlatformError(f"checkpoint {number} was given up: everstep explain {run_dir} says why")
        time.sleep(POLL_S)
    raise DeadlineError(f"checkpoint {number} was not complete after {WAIT_S:.0f} s; it may still be")
