"""Runs a worker of N processes (``--processes-per-worker N``): one replica of the model in N parts, one in each.

Process 0, the *leader*, is the worker that everybody else knows: it has the connections, the votes, the incarnation. It
forks the others, its *followers*, before the script begins; all of them run the script. They live and die together: a
replica that lacks a part is none, so the leader ends with the first follower that is lost, or stopped, and the
followers end with their leader. To the rest of the job that is one worker lost, and one that is started again.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import sys
import threading
import time
from typing import Final

from everstep.monitor.vitals import stat_fields
from everstep.platforms.local import die_with_parent

VARIABLE: Final = "EVERSTEP_UNIT"
"""Of the environment: ``INDEX/SIZE:FD,FD...``, the sockets to the followers, or the one to the leader."""

_IN_ORDER: Final = (0, 128 + signal.SIGTERM)  # a follower's exit: its script ended, or was told to leave
_LOOK_S: Final = 0.25
_STOPPED_S: Final = 1.5  # a stopped follower counts as lost; a debugger's short stop does not
_FATE_S: Final = 1.0  # until the end of another process of the worker has ended us
_LAST_S: Final = 60.0  # for followers whose script ends later than the leader's


class FollowerWatch:
    """Is the leader's thread that ends the worker with its first follower."""

    def __init__(self, pids: list[int]) -> None:
        self._fds = {os.pidfd_open(pid): pid for pid in pids}
        self._numbers = {pid: number for number, pid in enumerate(pids, 1)}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="everstep-followers", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<MateWatch of {sorted(self._fds.values())}>"

    def wait(self, timeout_s: float) -> None:
        """Until every follower has ended, or ``timeout_s`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._fds, timeout_s)

    def _run(self) -> None:
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        stopped: dict[int, float] = {}
        while self._fds:
            for fd, _ in poll.poll(_LOOK_S * 1000):
                poll.unregister(fd)
                self._ended(fd)
            now = time.monotonic()
            for pid in self._fds.values():
                since = stopped.setdefault(pid, now) if _state(pid) in "Tt" else 0.0
                if not since:
                    stopped.pop(pid, None)
                elif now - since > _STOPPED_S:
                    self._fall(pid, -signal.SIGKILL, "is stopped")

    def _ended(self, fd: int) -> None:
        pid = self._fds[fd]
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in _IN_ORDER:
            self._fall(pid, code, f"ended with status {code}")
        os.close(fd)
        with self._changed:
            del self._fds[fd]
            self._changed.notify_all()

    def _fall(self, pid: int, code: int, what: str) -> None:
        print(f"--- everstep: process {self._numbers[pid]} of this worker {what}: all of it ends", file=sys.stderr)
        sys.stderr.flush()
        if code > 0:
            os._exit(code)  # its error is told already
        os.kill(os.getpid(), signal.SIGKILL)


_watch: FollowerWatch | None = None


def become_unit(size: int) -> None:
    """Go on as ``size`` processes. In a process without other threads."""
    global _watch
    links: list[socket.socket] = []
    pids: list[int] = []
    leader = os.getpid()
    for index in range(1, size):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            die_with_parent(leader)
            for link in (ours, *links):
                link.close()
            os.environ[VARIABLE] = f"{index}/{size}:{theirs.detach()}"
            random.seed()
            return
        theirs.close()
        links.append(ours)
        pids.append(pid)
    os.environ[VARIABLE] = f"0/{size}:{','.join(str(link.detach()) for link in links)}"
    _watch = FollowerWatch(pids)


def await_fate() -> None:
    """Wait, after an error, for what becomes of this worker: if another process of it was lost, that was the cause, and
    ends us too."""
    if VARIABLE in os.environ:
        time.sleep(_FATE_S)


def await_followers() -> None:
    """The leader's script came to its end: those of its followers do so too, in a moment."""
    if _watch is not None:
        _watch.wait(_LAST_S)


def _state(pid: int) -> str:
    """Return a process's state as in ``ps``: R, S, T (stopped), ...; "?" once it is gone."""
    try:
        return stat_fields(pid)[0].decode()
    except (OSError, IndexError):
        return "?"


__all__ = ["VARIABLE", "FollowerWatch", "await_fate", "await_followers", "become_unit"]
