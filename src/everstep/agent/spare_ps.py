"""Keeps one ps that is started ahead (``ps/spare.py``), so that the ps in the place of a lost one is there at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from everstep.monitor.life_lock import life_lock
from everstep.platforms.local import LocalProcess, python_argv, spawn
from everstep.ps.spare import FLAG, PsRole, encode_role

SPARE_AFTER_S = 5.0
"""So long after the newest ps here was started: imports shall not take the time of what is just being rebuilt."""

KILL_AFTER_S = 2.0


class SparePs:
    """Is one process that waits to be a ps. One thread, which also started it, uses it."""

    def __init__(self, run_dir: Path, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._conn = ours
        try:
            argv = python_argv("everstep.ps", FLAG)
            log = run_dir / "logs" / "ps-spare.log"
            self.process: LocalProcess = spawn(
                "ps (spare)", argv, log, env=env, stdin=theirs.fileno(), life=life_lock()
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def __repr__(self) -> str:
        return f"<spare ps, pid {self.process.pid}>"

    def become(self, name: str, role: PsRole) -> LocalProcess | None:
        """Tell it its role, and return its process, which is no spare any more; None: it takes no word."""
        with contextlib.suppress(OSError), self._conn:
            if self.process.wait(0.0):
                return None
            self._conn.send(encode_role(role))
            self.process.name = name
            return self.process
        return None

    def end(self) -> None:
        """Kill it, and see that it is gone."""
        self._conn.close()
        with contextlib.suppress(OSError):
            self.process.signal(signal.SIGKILL)
            self.process.wait(KILL_AFTER_S)
            self.process.reap()
        self.process.close()


def environment(run_dir: Path, node: str) -> dict[str, str]:
    """Return the environment of a ps."""
    return {**os.environ, "EVERSTEP_RUN_DIR": str(run_dir), "EVERSTEP_NODE": node}
