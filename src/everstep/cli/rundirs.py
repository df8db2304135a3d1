"""Run directories, as the reading verbs meet them."""

from __future__ import annotations

from pathlib import Path

from everstep.config.load import read_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError


def open_run_dir(run_dir: Path) -> JobSpec:
    """The job of a run directory. Raises ConfigError: not there, not one, or from another version."""
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {run_dir}: not there")
    if not (run_dir / "job.json").exists():
        raise ConfigError(f"run directory {run_dir}: no job.json in it, so it is not a run directory of everstep")
    return read_spec(run_dir)
