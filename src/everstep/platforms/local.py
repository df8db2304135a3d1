"""Runs processes of this machine: start them so that they can never outlive us, watch them by pidfd, end them whole.

Every process leads a process group of its own: Ctrl-C in the terminal reaches only the agent, and what a process
leaves behind (a helper that it started) ends with its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from everstep.monitor.life_lock import VARIABLE, LifeLock
from everstep.storage.atomic import private

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl


def die_with_parent(parent_pid: int, signo: int = signal.SIGKILL) -> None:
    """The kernel sends us ``signo`` when the thread that started us ends (0: no more). Survives exec.

    A parent that was gone before this call is noticed by its pid, so there is no gap."""
    _prctl(_PR_SET_PDEATHSIG, int(signo), 0, 0, 0)
    if signo and os.getppid() != parent_pid:
        os._exit(1)


def before_exec(parent_pid: int) -> Callable[[], None]:
    """Return what a forked child does before exec: own process group, dies with its parent, signals as a new
    process."""

    def prepare() -> None:
        os.setpgid(0, 0)
        for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(signo, signal.SIG_DFL)
        die_with_parent(parent_pid)

    return prepare


def send_signal(pidfd: int, signo: int) -> bool:
    """Return False if the process is gone. By pidfd, so a reused pid is never hit."""
    try:
        signal.pidfd_send_signal(pidfd, signo)
    except ProcessLookupError:
        return False
    return True


def ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Return whether the process has ended, waiting up to ``timeout_s`` seconds."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def sweep_group(pid: int) -> None:
    """Kill what is left of the process group of a leader that has ended but was not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class LocalProcess:
    """Is a child of this process. ``fileno`` is readable once it has ended. ``life``: the lock that it may hold."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], life: LifeLock | None = None) -> None:
        self.name, self.life = name, life
        self.pid = popen.pid
        self.started_at = time.monotonic()
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)

    def fileno(self) -> int:
        return self._pidfd

    def signal(self, signo: int) -> bool:
        return send_signal(self._pidfd, signo)

    def wait(self, timeout_s: float) -> bool:
        return ended(self._pidfd, timeout_s)

    def reap(self) -> int | None:
        """Return exit code, or minus the signal's number; None while it runs. Ends the rest of its process group."""
        if not ended(self._pidfd):
            return None
        sweep_group(self.pid)
        return self._popen.wait()

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __repr__(self) -> str:
        return f"<process {self.name} pid={self.pid}>"


def spawn(
    name: str,
    argv: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    life: LifeLock | None = None,
) -> LocalProcess:
    """Start a process: stdin empty, or the descriptor ``stdin``; stdout and stderr appended to ``log``. Call it from
    a thread that lives as long as the child shall (the kernel's "parent" is the thread). ``life``: given to the child,
    which holds it by ``hold_life_lock``."""
    if life is not None:
        env = {**(os.environ if env is None else env), VARIABLE: str(life.fd)}
        pass_fds = (*pass_fds, life.fd)
    with open(log, "ab", opener=private) as out:
        popen = subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=out,
            stderr=out,
            env=None if env is None else dict(env),
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            preexec_fn=before_exec(os.getpid()),
        )
    if life is not None:
        life.started()
    return LocalProcess(name, popen, life)


def python_argv(module: str, *args: str) -> list[str]:
    """Return ``python -m module args`` that never picks up a module from the current directory (-P)."""
    return [sys.executable, "-P", "-m", module, *args]
