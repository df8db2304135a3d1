"""Reads a run where it is kept: the place to which a job of a cluster wrote what it left (``spec.out``)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from everstep.bounds import MALFORMED
from everstep.cli.cluster_job import cost_lines, in_cluster, out_at, status_lines
from everstep.cli.display import read_summary, summary_lines
from everstep.errors import ConfigError
from everstep.storage.kept_run import JOB_FILE, fetched_run, is_kept_run

_job_decoder = msgspec.json.Decoder(dict[str, Any])


def place_of(run_dir: Path) -> str:
    """Return the URL or directory of a RUN_DIR as it was given: paths have ``s3:/bucket`` for ``s3://bucket``."""
    scheme, colon, rest = str(run_dir).partition(":/")
    return f"{scheme}://{rest.lstrip('/')}" if colon and rest and "/" not in scheme else str(run_dir)


def is_kept(run_dir: Path) -> bool:
    """Return whether a RUN_DIR is a place at which a run is kept."""
    return is_kept_run(place_of(run_dir))


@contextlib.contextmanager
def read_here(run_dir: Path) -> Iterator[Path]:
    """Give a run directory that can be read: itself, or a copy of the run that a place keeps. ``k8s:JOB`` is where that
    job writes. Raises ConfigError: no run is kept there; StorageError, PlatformError."""
    where = out_at(run_dir) if in_cluster(run_dir) else place_of(run_dir)
    if not is_kept_run(where) and not in_cluster(run_dir):
        yield run_dir
        return
    with fetched_run(where) as here:
        yield here


def show_kept(run_dir: Path, as_json: bool) -> None:
    """Show how a job stood when its run was written."""
    with read_here(run_dir) as here:
        summary, job = read_summary(here), _job_of(here)
        if as_json:
            raw = json.loads((here / "summary.json").read_text()) if summary is not None else {"phase": "ended"}
            click.echo(json.dumps({"running": False, **raw, "cluster": job}))
            return
        lines = status_lines(job) if job else []
        lines += summary_lines(summary, Path(place_of(run_dir))) if summary is not None else ["there is no summary"]
        for line in lines:
            click.echo(line)


def show_kept_cost(run_dir: Path, as_json: bool) -> None:
    """Show what a job had cost when its run was written, by what its operator had counted. Raises ConfigError."""
    with read_here(run_dir) as here:
        job = _job_of(here)
    if not job:
        raise ConfigError(f"{place_of(run_dir)}: has no {JOB_FILE}, which says what the job cost")
    if as_json:
        costs = (job.get("status") or {}).get("cost") or {}
        click.echo(json.dumps({"cost": costs, "budget": (job["spec"].get("cost") or {}).get("budget")}))
        return
    for line in cost_lines(job):
        click.echo(line)


def _job_of(here: Path) -> dict[str, Any]:
    path = here / JOB_FILE
    if not path.exists():
        return {}
    try:
        job = _job_decoder.decode(path.read_bytes())
    except MALFORMED as error:
        raise ConfigError(f"{JOB_FILE} of the run that is kept there is damaged: {error}") from None
    if not all(isinstance(job.get(part), dict) for part in ("metadata", "spec", "status")):
        raise ConfigError(f"{JOB_FILE} of the run that is kept there is damaged: it needs metadata, spec and status")
    return job
