"""A child that is killed is known to die by the lock that it holds for life, not only when its memory is free."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.monitor import life_lock as module
from everstep.monitor.life_lock import DeathWatch, LifeLock, killed_by, life_lock
from everstep.platforms.local import LocalProcess, spawn

CHILD = """
import os, sys, threading, time
from everstep.monitor.life_lock import VARIABLE, hold_life_lock
if sys.argv[1] != "never":
    assert hold_life_lock() and VARIABLE not in os.environ
    assert not hold_life_lock()
open(sys.argv[2], "w").close()
if sys.argv[1] == "threads":
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
if sys.argv[1] == "fork" and os.fork() == 0:
    os._exit(0)
if sys.argv[1] == "exec":
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
if sys.argv[1] == "ends":
    sys.exit(3)
time.sleep(600)
"""


class Child:
    def __init__(self, folder: Path, what: str) -> None:
        lock = life_lock()
        assert lock is not None
        begun = folder / f"begun-{what}"
        argv = [sys.executable, "-c", CHILD, what, str(begun)]
        self.process: LocalProcess = spawn("child", argv, folder / "log", life=lock)
        self.told: list[int] = []
        self.heard = threading.Event()
        self.watch = DeathWatch(lock, self.process.pid, self._tell)
        self.lock = lock
        until(begun.exists)

    def _tell(self, status: int) -> None:
        self.told.append(status)
        self.heard.set()

    def end(self) -> int | None:
        self.process.signal(signal.SIGKILL)
        assert self.process.wait(20.0)
        status = self.process.reap()
        self.watch.close()
        return status


def until(what: object) -> None:
    end = time.monotonic() + 60.0
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


@pytest.mark.parametrize("what", ["threads", "fork"])
@pytest.mark.parametrize("signo", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_child_that_is_killed_is_told_once_with_its_signal(folder: Path, what: str, signo: int) -> None:
    child = Child(folder, what)
    assert child.lock.held and killed_by(child.process.pid) == 0 and not child.told
    child.process.signal(signo)
    assert child.heard.wait(20.0)
    assert child.end() == -signo and child.told == [-signo]


@pytest.mark.parametrize("what", ["ends", "exec", "never"])
def test_other_ends_are_not_told(folder: Path, what: str) -> None:
    """A process that replaces itself lets go of its locks, and lives on."""
    child = Child(folder, what)
    if what == "ends":
        assert child.process.wait(20.0)
    child.watch._thread.join(20.0 if what != "never" else 0.5)
    assert child.watch._thread.is_alive() == (what == "never") and not child.told
    child.end()
    child.watch._thread.join(20.0)
    assert not child.told and not child.watch._thread.is_alive()


def test_a_machine_without_such_locks_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_libc", object())
    assert life_lock() is None


def pages() -> int:
    """How many descriptors of such pages this process has."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "everstep-life" in str(path.readlink())
    return found


def test_no_descriptor_is_left(folder: Path) -> None:
    gc.collect()
    before = pages()
    locks = [LifeLock() for _ in range(3)]
    assert pages() == before + 6 and not any(lock.held for lock in locks)  # (each mapping has one of its own)
    locks.clear()
    assert pages() == before
    child = Child(folder, "threads")
    assert pages() == before + 1
    child.end()
    child.watch._thread.join(20.0)
    del child
    gc.collect()
    assert pages() == before
