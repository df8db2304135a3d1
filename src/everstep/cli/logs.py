"""Runs ``everstep logs``."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from everstep.agent.rundir import in_use
from everstep.cli.rundirs import open_run_dir
from everstep.cli.tail import LogTail
from everstep.errors import ConfigError

FOLLOW_EVERY_S = 0.2


def log_name(member: str) -> str:
    """Return the name of a member's log: ``worker:1`` -> ``worker-1``; ``master``, ``agent``, ``template`` as they
    are."""
    match = re.fullmatch(r"(worker|ps)[:\-](\d+)", member)
    if match:
        return f"{match[1]}-{match[2]}"
    if member in ("master", "agent", "template"):
        return member
    raise ConfigError(f"member {member!r}: say worker:N, ps:N, master, agent or template")


def show_logs(run_dir: Path, member: str | None, follow: bool) -> None:
    """Print the logs; with ``follow`` until the run is over and everything is read."""
    open_run_dir(run_dir)
    folder = run_dir / "logs"
    wanted = f"{log_name(member)}.log" if member else ""
    if wanted and not (folder / wanted).exists():
        there = ", ".join(sorted(p.stem.replace("-", ":") for p in folder.glob("*.log"))) or "none"
        raise ConfigError(f"{member}: no log in {folder}; there are: {there}")
    tails: dict[str, LogTail] = {}
    while True:
        running = follow and in_use(run_dir)
        quiet = True
        for path in sorted(folder.glob("*.log")):
            if wanted and path.name != wanted:
                continue
            prefix = "" if wanted else f"{path.stem.replace('-', ':')} | "
            for line in tails.setdefault(path.name, LogTail(path)).lines():
                quiet = False
                click.echo(prefix + line)
        if quiet and not running:
            return
        if quiet:
            time.sleep(FOLLOW_EVERY_S)
