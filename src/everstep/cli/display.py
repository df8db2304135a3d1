"""Shows a run while it goes: a live table on a terminal, plain lines elsewhere.

It only looks: the master's view of the job (asked twice a second), the run's ``events.jsonl`` and worker 0's log.
Losing any of them for a while (a master restarts) leaves the last picture standing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

import msgspec

from everstep.agent.worker_process import ERROR_MARK, LOG_MARK
from everstep.bounds import MALFORMED
from everstep.cli.tail import LogTail
from everstep.cli.view_text import count, failures_text, picture, progress_line, time_of_day, values_text
from everstep.errors import escaped_lines
from everstep.model.job_view import JobView

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

POLL_S = 0.5
PLAIN_EVERY_S = 5.0


class EventLine(msgspec.Struct):
    """Is one line of ``events.jsonl``."""

    at: float = 0.0
    member: str = ""
    action: str = ""
    reason: str = ""
    inputs: dict[str, str | int | float | bool] = {}

    def __str__(self) -> str:
        text = f"{self.action}: {self.reason}" if self.reason else self.action
        return f"{self.member} {text}" if self.member else text


_event_line_decoder = msgspec.json.Decoder(EventLine)


class Screen(Protocol):
    """Is where lines and the picture go."""

    def line(self, text: str, kind: str, at: float = 0.0) -> None:
        """Show a line of ``kind``: "event", "script" (worker 0's own output). ``at``: seconds since 1970, 0 for now."""

    def picture(self, view: JobView) -> None: ...

    def close(self) -> None: ...


class Display:
    """Is a thread that shows a run on a screen until ``stop``. ``fetch`` gives the master's status, or None."""

    def __init__(self, run_dir: Path, fetch: Callable[[], JobView | None], make: Callable[[], Screen]) -> None:
        self.view: JobView | None = None
        self._fetch = fetch
        self._make = make
        self._events = LogTail(run_dir / "events.jsonl", at_end=True)  # (of a job that goes on: what is new)
        self._output = ScriptOutput(run_dir / "logs" / "worker-0.log")
        self._waiting_texts: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="display", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, text: str) -> None:
        """Show a line of the agent's own; from any thread."""
        with self._lock:
            self._waiting_texts.append(text)
        self._wake.set()

    def stop(self) -> None:
        """Shows what is still unseen, then gives the terminal back."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=10.0)

    def _loop(self) -> None:
        screen = self._make()
        try:
            while not self._stop.is_set():
                with contextlib.suppress(OSError, ValueError):  # the terminal may be gone: the run goes on
                    self._lines(screen)
                    view = self._fetch()
                    if view is not None:
                        self.view = view
                        screen.picture(view)
                self._wake.wait(POLL_S)
                self._wake.clear()
            with contextlib.suppress(OSError, ValueError):
                self._lines(screen, last=True)
        finally:
            with contextlib.suppress(OSError, ValueError):
                screen.close()

    def _lines(self, screen: Screen, last: bool = False) -> None:
        with self._lock:
            texts, self._waiting_texts = self._waiting_texts, []
        for line in self._output.lines(last):
            screen.line(line, "script")
        for raw in self._events.lines():
            with contextlib.suppress(msgspec.MsgspecError):
                event = _event_line_decoder.decode(raw)
                screen.line(str(event), "event", event.at)
        for text in texts:
            screen.line(text, "event")


class ScriptOutput:
    """Picks the script's own lines of a worker's log: not everstep's marks, not the traceback (shown once, at the
    end)."""

    def __init__(self, path: Path) -> None:
        self._tail = LogTail(path)
        self._in_error = False

    def lines(self, last: bool = False) -> list[str]:
        shown = []
        for line in self._tail.lines(last):
            if line.startswith(LOG_MARK):
                self._in_error = line.startswith(ERROR_MARK)
            elif not self._in_error:
                shown.append(line)
        return shown


# ---------------------------------------------------------------- screens


class PlainScreen:
    """Shows lines only: events at once, progress every few seconds."""

    def __init__(self, out: TextIO, every_s: float = PLAIN_EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._every_s = every_s
        self._now = now
        self._next = now() + every_s

    def line(self, text: str, kind: str, at: float = 0.0) -> None:
        self._print(text if kind == "script" else f"[{time_of_day(at)}] {escaped_lines(text)}")

    def picture(self, view: JobView) -> None:
        if self._now() >= self._next:
            self._next = self._now() + self._every_s
            self._print(f"[{time_of_day()}] {progress_line(view)}")

    def close(self) -> None:
        self._out.flush()

    def _print(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


class LiveScreen:
    """Shows progress, members and values at the bottom; lines scroll above them."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(file=out, highlight=False)
        self._live: Live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def line(self, text: str, kind: str, at: float = 0.0) -> None:
        from rich.text import Text

        stamp = "" if kind == "script" else f"{time_of_day(at)} "
        body = Text(stamp, style="dim") + Text.from_ansi(text, style="" if kind == "script" else "cyan")
        self._console.print(body)

    def picture(self, view: JobView) -> None:
        self._live.update(picture(view))

    def close(self) -> None:
        self._live.stop()


def make_screen(live: bool, out: TextIO | None = None) -> Screen:
    """Return a live screen where ``out`` (stdout) is a terminal and ``live`` is wanted, else plain lines."""
    stream = out or sys.stdout
    if live and stream.isatty():
        return LiveScreen(stream)
    return PlainScreen(stream)


# ---------------------------------------------------------------- the end


class JobSummary(msgspec.Struct):
    """Is what ``summary.json`` says (more fields there are fine)."""

    phase: str = ""
    exit_code: int | None = None
    error: str = ""
    samples_done: int = 0
    wall_s: float = 0.0
    samples_per_s: float = 0.0
    failures: dict[str, int] = {}
    batches_retried: int = 0
    values: dict[str, float] = {}
    steps: int = 0
    generations: int = 0
    steps_void: int = 0
    checkpoint: int = 0
    trusted: int = 0
    set_aside: int = 0
    suspensions: int = 0
    suspended: str = ""
    by_itself: bool = False
    spent_usd: float | None = None
    budget_asked: bool = False

    @property
    def is_suspended(self) -> bool:
        return self.phase == "suspended"


_summary_decoder = msgspec.json.Decoder(JobSummary)


def read_summary(run_dir: Path) -> JobSummary | None:
    try:
        return _summary_decoder.decode((run_dir / "summary.json").read_bytes())
    except (OSError, *MALFORMED):
        return None


def summary_lines(summary: JobSummary, run_dir: Path) -> list[str]:
    """Return the last words of a run."""
    lines = [
        f"{summary.phase or 'ended'}: {count(summary.samples_done)} samples in {summary.wall_s:.1f} s, "
        f"{count(summary.samples_per_s)} samples/s"
    ]
    failures = failures_text(summary.failures)
    if summary.generations:
        again = f", {count(summary.steps_void)} steps done again" if summary.steps_void else ""
        lines.append(f"{count(summary.steps)} steps committed in {summary.generations} generations of the group{again}")
    lines.append(f"failures survived: {failures or 'none'}; batches retried: {summary.batches_retried}")
    if summary.values:
        lines.append("reported: " + values_text(summary.values))
    if summary.spent_usd is not None:
        lines.append(f"spent: {summary.spent_usd:.4f} USD (everstep cost {run_dir} says for what)")
    if summary.is_suspended:
        lines.append(f"suspended: {summary.suspended}; everstep unsuspend {run_dir} goes on")
    if summary.trusted:
        lines.append(f"began with checkpoint {summary.trusted}, which has no code of this job: --trust-checkpoint")
    lines.append(f"run directory: {run_dir} (everstep audit {run_dir})")
    return lines
