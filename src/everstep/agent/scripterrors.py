"""What scripts raised on this node: each traceback is shown once, however many workers and tries raise it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final

import msgspec

from everstep.agent.worker_process import WorkerError

_KEPT: Final = 64


class SeenError(msgspec.Struct):
    """Is an error that a script raised. ``shown``: its traceback."""

    name: str
    error: WorkerError
    shown: bool = False


class ScriptErrors:
    """``say``: shows a line to people. ``retries`` 0: nothing is tried again, so the job's end shows the traceback."""

    def __init__(self, say: Callable[[str], None], retries: int) -> None:
        self._say, self._retries = say, retries
        self._seen: collections.deque[SeenError] = collections.deque(maxlen=_KEPT)
        self._shown: set[str] = set()  # places

    def __repr__(self) -> str:
        return f"<ScriptErrors {len(self._seen)}>"

    def learn(self, name: str, error: WorkerError) -> None:
        """Take in an error: one that may pass is shown now; any other ends the job, and is shown then."""
        if error.too_large:
            return
        failure = error.failure
        where = failure.where if failure is not None else error.line
        if failure is not None and failure.cause != "script" and self._retries and where not in self._shown:
            self._shown.add(where)
            for line in f"{name} raised:\n{error.text}".splitlines():
                self._say(line)
        self._seen.append(SeenError(name, error, where in self._shown))

    def of(self, text: str) -> SeenError | None:
        """Return the first one that the end of a job speaks of."""
        found = [seen for seen in self._seen if seen.error.line in text]
        return next((seen for seen in found if f"{seen.name}:" in text), found[0] if found else None)
