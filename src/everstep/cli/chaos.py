"""``everstep chaos``: make members of one's own job slow, stop or kill them, to see what becomes of it."""

from __future__ import annotations

import gzip
import random
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from everstep.agent.rundir import in_use
from everstep.brain.events import Refused
from everstep.cli.link import ask_master, ask_view
from everstep.cli.status import need_running
from everstep.errors import ConfigError, EverstepError, UserError
from everstep.model.job_view import ShownState
from everstep.model.member import Role
from everstep.monitor.schedules import Planned, choose, parse_recording, parse_schedule, plan_recording
from everstep.net.messages import FaultAsked
from everstep.units import seconds

FOR_DEFAULT_S = 60.0
STOP_DEFAULT_S = 5.0
LOOK_S = 1.0  # so often a schedule looks whether there is a job yet
TEXT_MAX_BYTES = 64 * 2**20
USES = {
    "slow": ("factor", "for", "burn"),
    "stop": ("for",),
    "kill": (),
    "heal": (),
    "schedule": ("seed", "burn"),
    "recording": ("every", "burn"),
}
"""Which flags say more about which."""


def chosen(what: Mapping[str, Any], more: Iterable[str]) -> tuple[str, Any]:
    """The one thing to do, and its argument; ``more``: other flags that were given. Raises ConfigError."""
    given = [(name, value) for name, value in what.items() if value]
    if len(given) != 1:
        raise ConfigError("everstep chaos: give one of --slow, --kill, --stop, --heal, --schedule and --recording")
    name, value = given[0]
    idle = [f"--{flag}" for flag in more if flag not in USES[name]]
    if idle:
        says = ", ".join(f"--{flag}" for flag in USES[name]) or "no other flag"
        raise ConfigError(f"everstep chaos: {', '.join(idle)} says nothing about --{name}, which takes {says}")
    return name, value


def one(what: str, target: str, factor: float, span: str) -> Planned:
    """Return what the flags ask for. Raises ConfigError."""
    default_s = STOP_DEFAULT_S if what == "stop" else FOR_DEFAULT_S
    try:
        for_s = seconds(span) if span else default_s
    except ConfigError as error:
        raise ConfigError(f"--for {span}: {error}") from None
    return Planned(0.0, what, target, factor, for_s)


def inject(run_dir: Path, plan: Planned, burn: bool) -> None:
    """Make one fault, now. Raises UserError with the master's reason."""
    need_running(run_dir)
    _order(run_dir, plan, burn)
    click.echo(str(plan))


def play(run_dir: Path, plans: list[Planned], seed: int, burn: bool) -> None:
    """Play a whole schedule; returns at its end or the job's. Ctrl-C heals what it had begun."""
    need_running(run_dir)
    rng = random.Random(seed)
    began = time.monotonic()
    try:
        for number, plan in enumerate(plans):
            if not _wait(run_dir, began + plan.at_s):
                click.echo(f"the job is over; of {len(plans)} lines {number} were played")
                return
            try:
                chosen = choose(plan, _members(run_dir), rng) if "?" in plan.target else plan
                if chosen is None:
                    click.echo(f"{plan.at_s:.1f} s: {plan}: there is no such member now")
                    continue
                _order(run_dir, chosen, burn)
                click.echo(f"{plan.at_s:.1f} s: {chosen}")
            except EverstepError as error:  # e.g. it is just being replaced: the next line may do better
                click.echo(f"{plan.at_s:.1f} s: {plan}: {error}")
    except KeyboardInterrupt:
        _order(run_dir, Planned(0.0, "heal"), False)
        raise


def _wait(run_dir: Path, until: float) -> bool:
    """Wait until this moment (monotonic seconds); False: the job is over before."""
    while in_use(run_dir):
        left_s = until - time.monotonic()
        if left_s <= 0:
            return True
        time.sleep(min(LOOK_S, left_s))
    return False


def read_schedule(path: Path) -> list[Planned]:
    return parse_schedule(_read(path), str(path))


def read_recording(path: Path, every: str, workers: int) -> list[Planned]:
    """Its first rows are played to workers 0, 1, ... . Raises ConfigError."""
    every_s = seconds(every)
    if every_s <= 0:
        raise ConfigError(f"--every {every}: must be above 0")
    factors = parse_recording(_read(path).splitlines(), str(path))
    return plan_recording(factors, every_s, {k: f"worker:{k}" for k in range(min(workers, len(factors)))})


def workers_of(run_dir: Path) -> int:
    need_running(run_dir)
    return sum(m.startswith("worker:") for m in _members(run_dir))


def _read(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data: bytes = file.read(TEXT_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if len(data) > TEXT_MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {TEXT_MAX_BYTES} bytes; give an excerpt")
    return data.decode(errors="replace")


def _members(run_dir: Path) -> list[str]:
    return [str(m) for m in ask_view(run_dir).members if m.state is ShownState.ALIVE and m.role is not Role.MASTER]


def _order(run_dir: Path, plan: Planned, burn: bool) -> None:
    request = FaultAsked(plan.what, plan.target, plan.factor, plan.for_s, burn)  # type: ignore[arg-type]
    answer = ask_master(run_dir, request)
    if isinstance(answer, Refused):
        raise UserError(answer.error)
