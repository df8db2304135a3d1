"""Tells that a child is dying before the kernel has given back its memory.

Its parent hears of the end of a process (pidfd, wait), and its peers of the end of their connections, when all of its
memory is free again: 0.13 s later for each GB in a small virtual machine, so seconds for a large ps. What the kernel
does first is to let go of the robust locks that a dying thread holds (set_robust_list(2),
pthread_mutexattr_setrobust(3)). So the child's main thread holds such a lock for life, in a page that it shares with
its parent, where a thread waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from everstep.monitor.vitals import stat_fields

VARIABLE: Final = "EVERSTEP_LIFE_FD"
"""In the child's environment: the descriptor of the shared page."""

_HELD_AT: Final = 512  # byte of the page: the child holds the lock. (A pthread_mutex_t is smaller, on any machine.)
_LOOK_S: Final = 0.02  # until the child holds it
_WAIT_S: Final = 1.0  # until the watch looks whether it is over
_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_EXITING: Final = 0x4  # PF_EXITING, of the flags in /proc/PID/stat
_FLAGS, _EXIT_CODE = 6, -1  # fields there, behind the name

logger = logging.getLogger("everstep.agent")
_libc = ctypes.CDLL(None)


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))  # struct timespec


class LifeLock:
    """Is the lock, in the parent. Closed when it is collected."""

    def __init__(self) -> None:
        """Raises OSError: this machine has none."""
        self.fd = os.memfd_create("everstep-life", os.MFD_CLOEXEC)
        try:
            os.pwrite(self.fd, bytes(mmap.PAGESIZE), 0)  # (so that the memory is there)
            self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
            _make(_address(self._page))
        except BaseException:
            self.started()
            raise

    def __repr__(self) -> str:
        return f"<life lock, {'held' if self.held else 'not held'}>"

    @property
    def held(self) -> bool:
        return self._page[_HELD_AT] == 1

    def started(self) -> None:
        """The child has the page: ours needs no descriptor any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def wait(self, timeout_s: float) -> bool | None:
        """Wait until the child that holds the lock is dying, or has replaced itself by exec. Returns True then, None
        after ``timeout_s`` seconds, False: nobody holds it."""
        address, end_s = _address(self._page), time.time() + timeout_s
        until = _Time(int(end_s), int(end_s % 1 * 1e9))
        result = int(_libc.pthread_mutex_timedlock(address, ctypes.byref(until)))
        if result == errno.ETIMEDOUT:
            return None
        if result in (0, errno.EOWNERDEAD):
            _libc.pthread_mutex_unlock(address)
        return result == errno.EOWNERDEAD

    def __del__(self) -> None:
        self.started()


def hold_life_lock() -> bool:
    """Hold the lock that our parent made, if it did, on this thread: the main one. Never let go of it."""
    fd = int(os.environ.pop(VARIABLE, "-1"))
    if fd < 0:
        return False
    try:
        page = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
    except OSError:
        return False
    if _libc.pthread_mutex_lock(_address(page)):
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))  # mapped until the kernel has read the list of locks
    page[_HELD_AT] = 1
    return True


def killed_by(pid: int) -> int:
    """Return the number of the signal that a process is dying of; 0: it is not, or ends by itself."""
    try:
        fields = stat_fields(pid)
        dying = int(fields[_FLAGS]) & _EXITING
        return int(fields[_EXIT_CODE]) & 0x7F if dying else 0
    except (OSError, ValueError, IndexError):
        return 0


class DeathWatch:
    """Waits, on a thread of its own, for a child's death by a signal."""

    def __init__(self, lock: LifeLock, pid: int, tell: Callable[[int], None]) -> None:
        """Call ``tell`` with minus the signal's number, once, on that thread; never if it ends in another way."""
        self._pid, self._over = pid, threading.Event()
        arguments = lock, pid, tell, self._over
        self._thread = threading.Thread(target=_watch, args=arguments, name=f"everstep-life-{pid}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<death watch of {self._pid}>"

    def close(self) -> None:
        """The process is gone: its number may be another's."""
        self._over.set()


def _watch(lock: LifeLock, pid: int, tell: Callable[[int], None], over: threading.Event) -> None:
    while not lock.held:
        if over.wait(_LOOK_S):
            return
    while (dying := lock.wait(_WAIT_S)) is None:
        if over.is_set():
            return
    signo = killed_by(pid) if dying else 0
    if signo and not over.is_set():
        tell(-signo)


def life_lock() -> LifeLock | None:
    """Return a new lock; None: this machine has none, and an end is heard of when it is over."""
    try:
        return LifeLock()
    except (OSError, AttributeError) as error:
        logger.info("ends of processes are heard of when their memory is free: %s", error)
        return None


def _address(page: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))


def _make(address: ctypes.c_void_p) -> None:
    """Make a robust lock between processes there. Raises OSError, AttributeError."""
    attributes: Any = ctypes.create_string_buffer(64)
    for result in (
        _libc.pthread_mutexattr_init(attributes),
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED),
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
        _libc.pthread_mutex_init(address, attributes),
        _libc.pthread_mutexattr_destroy(attributes),
    ):
        if result:
            raise OSError(result, f"no robust lock: {os.strerror(result)}")


__all__ = ["VARIABLE", "DeathWatch", "LifeLock", "hold_life_lock", "killed_by", "life_lock"]
