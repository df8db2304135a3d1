"""``everstep status`` and ``stop``: what talks to a running master."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from everstep.agent.rundir import in_use
from everstep.brain.checkpoints import has_checkpoints
from everstep.brain.events import StopAsked
from everstep.cli.display import members_table, progress_line, read_summary, render, summary_lines
from everstep.cli.link import ask_master
from everstep.cli.rundirs import open_run_dir
from everstep.config.load import read_spec
from everstep.errors import ConfigError
from everstep.net.messages import GetStatus, StatusReport

__all__ = ["members_table", "progress_line", "show_status", "stop_job"]


def show_status(run_dir: Path, as_json: bool) -> None:
    """A running job: from its master. An ended one: its summary."""
    open_run_dir(run_dir)
    if in_use(run_dir):
        report = ask_master(run_dir, GetStatus())
        assert isinstance(report, StatusReport)
        if as_json:
            shown = msgspec.to_builtins(report)
            for member in shown["members"]:
                member["pid"] = member["pid"] or None  # (there is no process yet)
            click.echo(json.dumps({"running": True, **shown}))
            return
        from rich.console import Console

        Console(highlight=False).print(render(report))
        return
    summary = read_summary(run_dir)
    if as_json:
        raw = json.loads((run_dir / "summary.json").read_text()) if summary is not None else {"phase": "ended"}
        click.echo(json.dumps({"running": False, **raw}))
        return
    if summary is None:
        click.echo(f"not running, and ended without a summary; see {run_dir}/logs")
        return
    for line in summary_lines(summary, run_dir):
        click.echo(line)
    if summary.error:
        click.echo(f"error: {summary.error}")


def need_running(run_dir: Path) -> None:
    """Raises ConfigError: it is no run directory, or its job is not running."""
    open_run_dir(run_dir)
    if not in_use(run_dir):
        raise ConfigError(f"run directory {run_dir}: this job is not running")


def stop_job(run_dir: Path, checkpoint: bool = True) -> None:
    """``checkpoint``: take a last one first, where the job has checkpoints (a minute at most)."""
    need_running(run_dir)
    ask_master(run_dir, StopAsked("everstep stop", checkpoint))
    last = checkpoint and has_checkpoints(read_spec(run_dir))
    click.echo("stopping, after a last checkpoint (at once: --no-checkpoint)" if last else "stopping")
