"""Runs ``everstep scale``: more or fewer workers and ps while the job trains."""

from __future__ import annotations

from pathlib import Path

import click

from everstep.brain.events import Ok, Refused, ScaleAsked
from everstep.cli.link import ask_master
from everstep.cli.status import need_running
from everstep.errors import ConfigError, UserError
from everstep.model.member import Role


def scale(run_dir: Path, workers: int | None, ps: int | None) -> None:
    """Ask for one plan for both, taken or refused as a whole. Raises ConfigError, UserError with the master's
    reason."""
    wanted = [(role, count) for role, count in ((Role.WORKER, workers), (Role.PS, ps)) if count is not None]
    if not wanted:
        raise ConfigError("nothing to scale: give --workers N, --ps N or both")
    for role, count in wanted:
        if count < 1:
            flag = "--ps" if role is Role.PS else "--workers"
            raise ConfigError(f"{flag} {count}: at least 1 (everstep stop ends the job)")
    need_running(run_dir)
    (role, count), *more = wanted
    answer = ask_master(run_dir, ScaleAsked(role, count, tuple(more)))
    if isinstance(answer, Refused):
        raise UserError(answer.error)
    assert isinstance(answer, Ok)
    words = {Role.WORKER: "workers", Role.PS: "ps"}
    click.echo(" and ".join(f"{count} {words[role]}" for role, count in wanted) + " wanted")
