"""Runs ``everstep resize``: other threads and memory for processes of a running job that start from now on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from everstep.brain.events import Ok, Refused, ResizeAsked
from everstep.cli.link import ask_master
from everstep.cli.status import need_running
from everstep.errors import ConfigError, UserError
from everstep.model.member import Role
from everstep.model.process_size import ProcessSize
from everstep.policies.process_sizes import size_words
from everstep.units import size_bytes


class ResizeFlags(NamedTuple):
    """Has the flags of the command as they were given; None: not given."""

    ps_memory: str | None = None
    ps_threads: int | None = None
    worker_memory: str | None = None
    worker_threads: int | None = None


def wanted_sizes(flags: ResizeFlags) -> dict[Role, ProcessSize]:
    """Return what is wished for, by role. Raises ConfigError with one line."""
    found = {}
    for role, memory, threads in (
        (Role.WORKER, flags.worker_memory, flags.worker_threads),
        (Role.PS, flags.ps_memory, flags.ps_threads),
    ):
        memory_bytes = 0
        if memory is not None:
            try:
                memory_bytes = size_bytes(memory)
            except ConfigError as error:
                raise ConfigError(f"--{role}-memory {memory}: expected a size such as 2GB ({error})") from None
            if memory_bytes < 1:
                raise ConfigError(f"--{role}-memory {memory}: must be above 0; leave it out to keep what there is")
        if threads is not None and threads < 1:
            raise ConfigError(f"--{role}-threads {threads}: at least 1; leave it out to keep what there are")
        if memory is not None or threads is not None:
            found[role] = ProcessSize(threads or 0, memory_bytes)
    if not found:
        raise ConfigError("nothing to resize: give --ps-memory, --ps-threads, --worker-memory or --worker-threads")
    return found


def resize(run_dir: Path, flags: ResizeFlags) -> None:
    """Ask for other sizes, taken or refused as a whole. Raises ConfigError, UserError with the master's reason."""
    wanted = wanted_sizes(flags)
    if str(run_dir).startswith("k8s:"):
        raise ConfigError(
            f"{run_dir}: the memory and processors of a pod are fixed when it is made: write them into the job "
            "(resources of the containers in spec.ps.template and spec.worker.template), and submit it anew"
        )
    need_running(run_dir)
    answer = ask_master(run_dir, ResizeAsked(tuple(wanted.items())))
    if isinstance(answer, Refused):
        raise UserError(answer.error)
    assert isinstance(answer, Ok)
    words = " and ".join(f"each {role} {size_words(size)}" for role, size in wanted.items())
    click.echo(f"{words}: from its next start on; those that run keep what they have")
