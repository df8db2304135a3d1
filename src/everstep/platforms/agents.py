"""Starts agents of further machines: as processes of this machine, or on machines that start them by themselves."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from everstep.errors import PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import Grant
from everstep.platforms.local import LocalProcess, spawn, sweep_group

NODES = "nodes"
"""Folder of the run directory: one directory for each agent, ``NODE.LIFE``."""
_LOOK_S = 0.05
_KILL_S = 5.0


class AgentEnded(NamedTuple):
    """Says that an agent has ended. ``status``: exit code, or minus the signal's number."""

    node: NodeId
    status: int
    lived_s: float


class LocalAgents:
    """Runs ``everstep agent --join`` as processes of this machine, each with a run directory of its own below the
    job's.

    Call it from one thread, which lives as long as the agents shall: the kernel ends them with it."""

    def __init__(self, run_dir: Path, at: Callable[[], str], workers: int, ps: int = 0) -> None:
        """``at``: HOST:PORT of the master. ``workers``, ``ps``: that each agent takes. Each counts as a machine."""
        self._run_dir, self._at, self._workers, self._ps = run_dir, at, workers, ps
        self._running: dict[NodeId, LocalProcess] = {}
        self._warned: set[NodeId] = set()

    def __repr__(self) -> str:
        return f"<{len(self._running)} agents here>"

    def start(self, grant: Grant, life: int) -> None:
        """Raise PlatformError if the process cannot be started."""
        self.stop(grant.node)
        name = f"{grant.node}.{life}"
        folder = self._run_dir / NODES
        argv = [sys.executable, "-P", "-m", "everstep.cli", "agent", "--join", self._at(), "--node", grant.node]
        argv += ["--secret-file", str(self._run_dir / "secret"), "--run-dir", str(folder / name)]
        argv += ["--ps", str(self._ps), "--machine", grant.node]
        argv += ["--workers", str(self._workers), "--life", str(life), "--notices", f"file:{self._notice(grant.node)}"]
        if grant.offer.hardware:
            argv += ["--hardware", grant.offer.hardware]
        if grant.offer.zone:
            argv += ["--zone", grant.offer.zone]
        argv += ["--market", grant.offer.market.value]
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._notice(grant.node).unlink(missing_ok=True)
            self._running[grant.node] = spawn(name, argv, folder / f"{name}.log")
        except OSError as error:
            raise PlatformError(f"{grant.node} cannot be started: {error.strerror or error}") from None

    def warn(self, node: NodeId, in_s: float | None) -> None:
        """Write the file that the agent watches. Raise PlatformError if the disk refuses it."""
        self._warned.add(node)
        file = self._notice(node)
        part = file.with_suffix(".part")
        try:
            part.write_text("" if in_s is None else f"{in_s:.3f}")
            part.replace(file)
        except OSError as error:
            raise PlatformError(f"{node} cannot be warned: {error.strerror or error}") from None

    def stop(self, node: NodeId) -> None:
        """Kill the agent's process group; what the agent has started dies with it."""
        self._warned.discard(node)
        process = self._running.pop(node, None)
        if process is not None:
            _kill(process)
        with contextlib.suppress(OSError):
            self._notice(node).unlink(missing_ok=True)

    def ended(self) -> tuple[AgentEnded, ...]:
        out = []
        for node, process in list(self._running.items()):
            status = process.reap()
            if status is not None:
                del self._running[node]
                process.close()
                out.append(AgentEnded(node, status, time.monotonic() - process.started_at))
        return tuple(out)

    def close(self, wait_s: float) -> None:
        for node in list(self._warned):
            self.stop(node)  # (it is empty, and waits for the end of its machine)
        end = time.monotonic() + wait_s
        while self._running and time.monotonic() < end:
            self.ended()
            time.sleep(_LOOK_S)
        for node in list(self._running):
            self.stop(node)

    def _notice(self, node: NodeId) -> Path:
        return self._run_dir / NODES / f"{node}.going"


def _kill(process: LocalProcess) -> None:
    sweep_group(process.pid)
    process.signal(signal.SIGKILL)
    process.wait(_KILL_S)
    process.reap()
    process.close()


class AgentsElsewhere:
    """Stands for machines that start their agents by themselves. ``drain`` has the master empty a node within so many
    seconds."""

    def __init__(self, drain: Callable[[NodeId, float | None], None]) -> None:
        self._drain = drain

    def __repr__(self) -> str:
        return "<agents elsewhere>"

    def start(self, grant: Grant, life: int) -> None:
        """The machine does it."""

    def warn(self, node: NodeId, in_s: float | None) -> None:
        self._drain(node, in_s)

    def stop(self, node: NodeId) -> None:
        """The machine is gone, and its agent with it."""

    def ended(self) -> tuple[AgentEnded, ...]:
        return ()

    def close(self, wait_s: float) -> None:
        pass
