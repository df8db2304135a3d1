"""An embedded job per test: the real brain, journal, store and ps service, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep as es
from everstep.api.job import Job

torch.set_num_threads(1)  # small models: threads only wait for each other


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``join(**options)``: a job in a fresh run directory, closed after the test."""
    jobs: list[Job] = []

    def make(**options: Any) -> Job:
        for job in jobs:
            job.close()
        jobs.append(es.join(run_dir=str(tmp_path / f"run{len(jobs)}"), **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
