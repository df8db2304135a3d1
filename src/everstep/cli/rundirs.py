"""Run directories, as the reading verbs meet them."""

from __future__ import annotations

from pathlib import Path

from everstep.config.load import read_spec
from everstep.config.spec import JobSpec


def open_run_dir(run_dir: Path) -> JobSpec:
    """Return the job of a run directory. Raises ConfigError: not there, not one, or from another version."""
    return read_spec(run_dir)
