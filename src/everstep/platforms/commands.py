"""Commands of the user that are asked something: each is bounded in time and in what it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from everstep.errors import PlatformError


def run_command(
    argv: Sequence[str], limit_s: float, most_bytes: int, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command to its end; return its exit code and what it printed, without white space around it.

    A command that takes longer than ``limit_s`` is killed with its process group. Raise PlatformError with one line:
    it cannot be started, prints more than ``most_bytes``, or did not end in time."""
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=None if env is None else dict(env),
        )
    except OSError as error:
        raise PlatformError(f"cannot be started: {error.strerror or error}") from None
    assert process.stdout is not None
    timer = threading.Timer(limit_s, _kill_group, (process.pid,))
    timer.start()
    try:
        text = process.stdout.read(most_bytes)
        if len(text) == most_bytes:
            raise PlatformError(f"prints more than {most_bytes >> 10} KB")
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            _kill_group(process.pid)
            process.wait()
        process.stdout.close()
    if code == -signal.SIGKILL:
        raise PlatformError(f"did not end within {limit_s:g} s")
    return code, text.decode("utf-8", "replace").strip()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
