"""Where a worker's script is, asked from outside: a signal makes the process write its Python stacks to a file.

The handler is ``faulthandler``'s, in C: it needs neither the interpreter nor the script's cooperation, so it works
while a native call holds the interpreter. The signal is a real-time one, which scripts and libraries do not use.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from everstep.monitor.vitals import catches, children

SIGNAL: Final = signal.SIGRTMAX - 3
FRAMES_MAX: Final = 30
_READ_MAX: Final = 256 * 1024
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def stack_path(log: Path) -> Path:
    """Return the path of the stacks beside a log: ``logs/worker-0.log`` -> ``logs/worker-0.stack``."""
    return log.with_suffix(".stack")


def dump_on_signal(log: Path) -> None:
    """In a worker, once: from now on ``SIGNAL`` writes the stacks of all threads. A full disk costs only these."""
    try:
        fd = os.open(stack_path(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)


def ask_for_stack(pid: int, pidfd: int) -> bool:
    """Have the process write its stacks, and the ones that it forked theirs. False: it would not understand."""
    if not catches(pid, SIGNAL):
        return False
    for child in children(pid):
        if catches(child, SIGNAL):
            try:
                os.kill(child, SIGNAL)
            except OSError:
                continue
    try:
        signal.pidfd_send_signal(pidfd, SIGNAL)
    except OSError:
        return False
    return True


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_stacks(path: Path, start: int) -> str:
    """Return what was written behind ``start``."""
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            return stream.read(_READ_MAX).decode(errors="replace")
    except OSError:
        return ""


def main_stack(text: str) -> list[tuple[str, int, str]]:
    """Return the frames (file, line, function) of the main thread, outermost first: the last that a dump shows."""
    frames: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            frames = []
        elif (match := _FRAME.match(line)) is not None:
            frames.append((match[1], int(match[2]), match[3]))
    return frames[::-1][-FRAMES_MAX:]


def words_of(frames: Sequence[tuple[str, int, str]], script: Path) -> tuple[str, tuple[str, ...]]:
    """Return the place in a few words, and the frames as lines. ``script``: its innermost frame is named first."""
    if not frames:
        return "", ()
    own = [f for f in frames if f[0] == str(script) or Path(f[0]).parent == script.parent]
    place = _place(own[-1] if own else frames[-1])
    if own and own[-1] != frames[-1]:
        place += f" (in {_place(frames[-1])})"
    names = [i for i, f in enumerate(frames) if f[0] == str(script)]
    return place, tuple(f"{file}, line {line}, in {name}" for file, line, name in frames[names[0] if names else 0 :])


def _place(frame: tuple[str, int, str]) -> str:
    return f"{Path(frame[0]).name} line {frame[1]} in {frame[2]}"
