from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from everstep.net.auth import Secret, create_secret


@pytest.fixture(scope="session")
def secret() -> Secret:
    """A job's secret with its certificate."""
    with tempfile.TemporaryDirectory() as folder:
        return create_secret(Path(folder) / "secret")


@pytest.fixture(scope="session")
def other_secret() -> Secret:
    with tempfile.TemporaryDirectory() as folder:
        return create_secret(Path(folder) / "secret")


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Longer than a Unix socket's path may be."""
    long = tmp_path / ("d" * 90) / ("e" * 90)
    long.mkdir(parents=True)
    yield long


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until something holds; fails after a minute (it may be a process that has to start)."""

    def wait(holds: Callable[[], object]) -> None:
        import threading

        end = monotonic() + 60
        pause = threading.Event()
        while not holds():
            assert monotonic() < end, "it never came to hold"
            pause.wait(0.005)

    return wait
