"""Ends a script that is asked to leave, also where Python drops the exception that ends it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

AGAIN_S = 0.05


class ScriptExit(SystemExit):
    """Ends the script of a worker that is asked to leave; ``code``: the exit status of its process."""


def ask_again_when_lost() -> None:
    """Have the signal sent again if it came while an object was finalized.

    Python drops what is raised in ``__del__`` and in generators that are collected (it prints "Exception ignored in").
    Then the worker would go on as if nobody had asked it."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, ScriptExit):
            before(unraisable)
            return
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
