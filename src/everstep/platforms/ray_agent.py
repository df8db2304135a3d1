"""Is the actor of a node: it starts the agent on its machine, and tells how the agent ended.

The actor is detached, so that a killed ``everstep run`` finds it again. If nobody takes it away after its agent has
ended, it goes by itself, and the last one takes the placement group along.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from everstep.platforms.local import spawn

ORPHAN_S = 60.0
_LOG_END = 8192


class RayAgent:
    """Runs the agent of one node as a process. Its methods are called by Ray."""

    def __init__(self, words: Sequence[str], secret: bytes, node: str, group: str, orphan_s: float = ORPHAN_S) -> None:
        """Make an agent. ``words``: of ``everstep agent``, but for its files. ``group``: of the placement."""
        self._words, self._secret, self._node, self._group = list(words), secret, node, group
        self._orphan_s = orphan_s
        self._over = threading.Event()
        self._status, self._why = 0, ""
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    def where(self) -> tuple[str, str]:
        """Return the id of the Ray node that this is on, and the machine's name."""
        import ray

        return str(ray.get_runtime_context().get_node_id()), os.uname().nodename

    def ended(self) -> tuple[int, str]:
        """Wait until the agent has ended; return its exit code, or minus a signal's number, and its last words."""
        self._over.wait()
        return self._status, self._why

    def _run(self) -> None:
        """Start the agent from this thread, which lives as long as the actor: the kernel ties the agent to it."""
        folder = Path(tempfile.mkdtemp(prefix=f"everstep-{self._node}-"))
        log = folder / "agent.log"
        try:
            secret = folder / "secret"
            secret.touch(mode=0o600)
            secret.write_bytes(self._secret)
            argv = [sys.executable, "-P", "-m", "everstep.cli", "agent", *self._words]
            argv += ["--secret-file", str(secret), "--run-dir", str(folder / "run"), "--machine", self._machine()]
            process = spawn(self._node, argv, log)
            while (status := process.reap()) is None:
                process.wait(1.0)
            self._status, self._why = status, _last_words(log)
        except OSError as error:
            self._status, self._why = 4, f"{error.filename or ''}: {error.strerror or error}"
        finally:
            with contextlib.suppress(OSError):
                (folder / "secret").unlink(missing_ok=True)
            if not self._status:
                shutil.rmtree(folder, ignore_errors=True)
            self._over.set()
        self._leave()

    def _machine(self) -> str:
        return self.where()[0]

    def _leave(self) -> None:
        """Nobody took this actor away: its ``everstep run`` is gone."""
        import ray
        from ray.util import list_named_actors
        from ray.util.placement_group import get_placement_group, remove_placement_group

        time.sleep(self._orphan_s)
        with contextlib.suppress(Exception):
            others = [name for name in list_named_actors() if name.startswith(f"{self._group}.")]
            if len(others) <= 1:
                remove_placement_group(get_placement_group(self._group))
        ray.kill(ray.get_runtime_context().current_actor)


def _last_words(log: Path) -> str:
    """Return the last line that begins with ``everstep:``; "": there is none."""
    try:
        lines = log.read_bytes()[-_LOG_END:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("everstep: ") for line in reversed(lines) if line.startswith("everstep: ")), "")
