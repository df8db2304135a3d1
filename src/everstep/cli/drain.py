"""``everstep drain``: empty a member or a node before it goes, so that nothing is lost with it."""

from __future__ import annotations

import time
from pathlib import Path

import click

from everstep.brain.events import DrainAsked, Ok, Refused
from everstep.cli.link import ask_master, ask_view
from everstep.cli.status import need_running
from everstep.errors import ConfigError, DeadlineError, EverstepError, UserError
from everstep.model.job_view import MemberView
from everstep.units import seconds

POLL_S = 0.5


def drain(run_dir: Path, target: str, deadline: str) -> None:
    """Wait until ``target`` ("ps:1", "worker:0" or a node) is empty and has ended.

    Raises ConfigError, UserError with the master's reason, and DeadlineError when it is not done in time: what is
    left then goes on being moved; should the target end before that, the parity has to rebuild it.
    """
    try:
        deadline_s = seconds(deadline)
    except ConfigError as error:
        raise ConfigError(f"--deadline {deadline}: {error}") from None
    if not 0 < deadline_s <= 86_400:
        raise ConfigError(f"--deadline {deadline}: must be above 0 and at most a day")
    need_running(run_dir)
    began = time.monotonic()
    newest = {(m.role, m.slot): m.incarnation for m in ask_view(run_dir).members}
    answer = ask_master(run_dir, DrainAsked(target, deadline_s))
    if isinstance(answer, Refused):
        raise UserError(answer.error)
    assert isinstance(answer, Ok)
    here: list[MemberView] = []
    while True:
        try:
            view = ask_view(run_dir)
        except EverstepError:  # the job ended, or its master is coming back
            need_running(run_dir)
        else:
            here = [m for m in view.members if target in (m.node, str(m)) and m.running]
            # (a slot that was filled again has another node, or a process of a later life)
            here = [m for m in here if m.incarnation <= newest.get((m.role, m.slot), m.incarnation)]
            if not here:
                click.echo(f"{target} is empty after {time.monotonic() - began:.1f} s")
                return
        if time.monotonic() - began >= deadline_s:
            break
        time.sleep(min(POLL_S, max(0.01, deadline_s - (time.monotonic() - began))))
    partitions, mirrors = sum(m.partitions for m in here), sum(m.mirrors for m in here)
    raise DeadlineError(
        f"{target} is not empty after {deadline_s:g} s: {len(here)} members, {partitions} partitions and "
        f"{mirrors} mirrors are still there; they go on being moved away"
    )
