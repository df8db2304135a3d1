"""Is the agent's side of the template: it starts it, asks it for workers, and hears of their ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from everstep.agent.template import Ended, Fork, Forked, Packet, Ready, receive, send
from everstep.allreduce.environment import FORKABLE, NCCL_ENVIRONMENT
from everstep.platforms.local import LocalProcess, python_argv, spawn

__all__ = ["Ended", "Fork", "Forked", "Ready", "WarmTemplate"]

# The template itself computes nothing: no thread pools that a fork would tear (workers set their own number).
_SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WarmTemplate:
    """Is one template process. ``conn`` is readable when it has something to say, or is gone."""

    def __init__(self, run_dir: Path, script: Path, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.conn = ours
        self.ready: Ready | None = None
        argv = python_argv(
            "everstep.agent.template", str(theirs.fileno()), str(run_dir.resolve()), str(script), *modules
        )
        env = {**FORKABLE, **os.environ, **NCCL_ENVIRONMENT, **_SINGLE_THREADED}
        env["EVERSTEP_RUN_DIR"] = str(run_dir.resolve())
        try:
            log = run_dir / "logs" / "template.log"
            self.process: LocalProcess = spawn("template", argv, log, env=env, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def fork(self, request: Fork) -> None:
        """Ask for a worker; the answer comes as Forked. Raises OSError when the template is gone."""
        send(self.conn, request)

    def receive(self) -> Packet | None:
        packet = receive(self.conn)
        if isinstance(packet, Ready):
            self.ready = packet
        return packet

    def close(self) -> None:
        """The template sees the end of its socketpair, ends its workers and leaves."""
        self.conn.close()
