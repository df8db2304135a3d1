"""Runs ``everstep status`` and ``stop``: what talks to a running master."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from everstep.agent.rundir import in_use
from everstep.brain.checkpoints import has_checkpoints
from everstep.brain.events import StopAsked
from everstep.cli.display import read_summary, summary_lines
from everstep.cli.link import ask_master, ask_view
from everstep.cli.rundirs import open_run_dir
from everstep.cli.view_text import picture
from everstep.config.load import read_spec
from everstep.config.renamed import renamed_line
from everstep.errors import ConfigError
from everstep.model.job_view import JobView


def show_status(run_dir: Path, as_json: bool) -> None:
    """Show a running job, from its master, or an ended one, from its summary. An ended one: its summary."""
    open_run_dir(run_dir)
    if in_use(run_dir) and not is_suspended(run_dir):
        view = ask_view(run_dir)
        if as_json:
            click.echo(json.dumps({"running": True, **as_builtins(view)}))
            return
        from rich.console import Console

        Console(highlight=False).print(picture(view))
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


RENAMED = {
    "values": "reported",
    "members[].restarts": "members[].losses",
    "members[].shard": "members[].works_on",
    "members[].buckets": "members[].partitions",
    "checkpoint.increment": "checkpoint.incremental",
    "checkpoint.images": "checkpoint.snapshots",
    "checkpoint.buckets": "checkpoint.partitions",
    "group.hold": "group.paused",
    "group.voided": "group.steps_void",
}
"""Fields of ``status --json`` that had another name in the version before: old path -> path. For one version the old
names are there, too, and ``renamed`` in the output says so."""


def as_builtins(view: JobView) -> dict[str, Any]:
    """Return what ``status --json`` prints of a view."""
    shown: dict[str, Any] = msgspec.to_builtins(view)
    for member in shown["members"]:
        member["pid"] = member["pid"] or None  # (there is no process yet)
    for old, new in RENAMED.items():
        *path, name = new.split(".")
        found = shown[path[0].removesuffix("[]")] if path else shown
        for one in found if isinstance(found, list | tuple) else [found]:
            if one is not None:
                one[old.rpartition(".")[2]] = one[name]
    return {**shown, "renamed": [renamed_line(old, new) for old, new in RENAMED.items()]}


def is_suspended(run_dir: Path) -> bool:
    """Return whether the job of a run directory is suspended (while somebody may wait there for capacity)."""
    summary = read_summary(run_dir)
    return summary is not None and summary.is_suspended


def need_running(run_dir: Path) -> None:
    """Raises ConfigError: it is no run directory, or its job is not running."""
    open_run_dir(run_dir)
    if is_suspended(run_dir):
        raise ConfigError(f"run directory {run_dir}: this job is suspended: everstep unsuspend {run_dir} goes on")
    if not in_use(run_dir):
        raise ConfigError(f"run directory {run_dir}: this job is not running")


def stop_job(run_dir: Path, checkpoint: bool = True) -> None:
    """``checkpoint``: take a last one first, where the job has checkpoints (a minute at most)."""
    need_running(run_dir)
    ask_master(run_dir, StopAsked("everstep stop", checkpoint))
    last = checkpoint and has_checkpoints(read_spec(run_dir))
    click.echo("stopping, after a last checkpoint (at once: --no-checkpoint)" if last else "stopping")
