"""Processes that tests start share one import of torch (see ``forkserver/forkserver.py``), workers of pytest-xdist what
they compile."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

FORKSERVER = Path(__file__).parent / "forkserver"
ADDRESS = "EVERSTEP_TEST_FORKSERVER"
os.environ["EVERSTEP_HISTORY"] = "off"  # no test writes into the history of its user
settings.register_profile("everstep", deadline=None)  # the machine may be busy: no time of an example says anything
settings.load_profile("everstep")
_SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def pytest_configure(config: pytest.Config) -> None:
    """Start the server, once for all workers of pytest-xdist. It imports nothing before it is asked."""
    if hasattr(config, "workerinput"):
        return
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup all jobs would do without it
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile everstep, each for itself
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"  # the last long test must not wait behind others
    folder = tempfile.TemporaryDirectory(prefix="everstep-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    address = os.environ[ADDRESS] = f"{folder.name}/sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    process = subprocess.Popen(
        [sys.executable, str(FORKSERVER / "forkserver.py"), str(listener.fileno())],
        stdin=subprocess.PIPE,  # it ends when this ends
        env={**os.environ, **_SINGLE_THREADED, "EVERSTEP_RUN_DIR": "-" * 1000},
        cwd=folder.name,
        pass_fds=[listener.fileno()],
    )
    listener.close()

    def end() -> None:
        process.kill()
        process.wait(10)
        assert process.stdin is not None
        process.stdin.close()

    config.add_cleanup(end)


def _import_tests(config: pytest.Config) -> None:
    """What collecting does next, but each worker begins elsewhere: most of what it gets to has another one compiled,
    with its assertions rewritten, which is half of the collecting in a fresh clone."""
    named = [Path(arg.partition("::")[0]) for arg in config.args]
    files = sorted({file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])})
    worker: dict[str, Any] = config.workerinput  # type: ignore[attr-defined]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        folder = str(file.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting says it
            importlib.import_module(file.stem)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Without searches for garbage: a million objects come that stay, and later searches leave them out."""
    gc.disable()
    if hasattr(session.config, "workerinput"):
        _import_tests(session.config)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker of pytest-xdist is dealt its part of the tests of real processes, and then of the quick ones: those
    are what is left to steal in the end, when nobody should wait for a long one that began last."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        return
    n = int(worker["workercount"])
    kinds: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item in items:
        kinds[item.get_closest_marker("processes") is None].append(item)
    items[:] = [item for i in range(n) for k in kinds for item in k[len(k) * i // n : len(k) * (i + 1) // n]]


@pytest.fixture(autouse=True)
def _fork_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test of real processes starts finds the server, unless it is marked ``cold``."""
    if request.node.get_closest_marker("cold") or not request.node.get_closest_marker("processes"):
        monkeypatch.delenv(ADDRESS, raising=False)
    else:
        paths = [str(FORKSERVER), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    yield
