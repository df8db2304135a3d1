from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from local_jobs import Run
from node_jobs import Networks, joined_networks


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A job of the kind that the test's file says by ``RUN``; ended with the test."""
    made: Run = getattr(request.module, "RUN", Run)(tmp_path)
    yield made
    made.close()


@pytest.fixture
def networks() -> Iterator[Networks]:
    yield from joined_networks()
