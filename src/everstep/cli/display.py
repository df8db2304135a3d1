"""What a run looks like while it goes: a live table on a terminal, plain lines elsewhere.

It only looks: the master's status (asked twice a second), the run's ``events.jsonl`` and worker 0's log. Losing any
of them for a while (a master restarts) leaves the last picture standing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

from everstep.agent.worker_process import ERROR_MARK, LOG_MARK
from everstep.bounds import MALFORMED
from everstep.cli.tail import LogTail
from everstep.errors import escaped_lines
from everstep.net.messages import CheckpointStatus, GroupStatus, MemberStatus, ProtectionStatus, StatusReport
from everstep.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

POLL_S = 0.5
PLAIN_EVERY_S = 5.0
_STATE_COLOURS = {"alive": "green", "starting": "yellow", "suspect": "yellow", "lost": "red", "left": "dim"}


class EventLine(msgspec.Struct):
    """One line of ``events.jsonl``."""

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
    """Where lines and the picture go."""

    def line(self, text: str, kind: str, at: float = 0.0) -> None:
        """``kind``: "event", "script" (worker 0's own output). ``at``: seconds since 1970, 0 for now."""

    def picture(self, status: StatusReport) -> None: ...

    def close(self) -> None: ...


class Display:
    """A thread that shows a run on a screen until ``stop``. ``fetch`` gives the master's status, or None."""

    def __init__(self, run_dir: Path, fetch: Callable[[], StatusReport | None], make: Callable[[], Screen]) -> None:
        self.status: StatusReport | None = None
        self._fetch = fetch
        self._make = make
        self._events = LogTail(run_dir / "events.jsonl")
        self._output = ScriptOutput(run_dir / "logs" / "worker-0.log")
        self._said: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="display", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, text: str) -> None:
        """A line of the agent's own; from any thread."""
        with self._lock:
            self._said.append(text)
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
                    status = self._fetch()
                    if status is not None:
                        self.status = status
                        screen.picture(status)
                self._wake.wait(POLL_S)
                self._wake.clear()
            with contextlib.suppress(OSError, ValueError):
                self._lines(screen, last=True)
        finally:
            with contextlib.suppress(OSError, ValueError):
                screen.close()

    def _lines(self, screen: Screen, last: bool = False) -> None:
        with self._lock:
            said, self._said = self._said, []
        for line in self._output.lines(last):
            screen.line(line, "script")
        for raw in self._events.lines():
            with contextlib.suppress(msgspec.MsgspecError):
                event = _event_line_decoder.decode(raw)
                screen.line(str(event), "event", event.at)
        for text in said:
            screen.line(text, "event")


class ScriptOutput:
    """The script's own lines of a worker's log: not everstep's marks, not the traceback (shown once, at the end)."""

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


# ---------------------------------------------------------------- words


def count(value: float) -> str:
    return f"{value:,.0f}"


def time_of_day(at: float = 0.0) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at or None))


def clock(seconds: float) -> str:
    """``0:07``, ``1:02:03``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def eta_s(status: StatusReport) -> float | None:
    """Seconds until the epochs known so far are done, at the present speed."""
    left = sum(e.samples - e.samples_done for e in status.epochs)
    if not status.epochs or status.samples_per_s <= 0:
        return None
    return left / status.samples_per_s


def values_text(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in sorted(values.items()))


def checkpoint_text(found: CheckpointStatus, at: float) -> str:
    """``checkpoint 12 0:34 ago (incremental 3.4 MiB); writing 13: 20/64``."""
    text = "no checkpoint yet"
    if found.newest:
        text = f"checkpoint {found.newest} {clock(at - found.at)} ago"
        if found.newest == found.resumed:
            text += " (resumed from it)"
        else:
            text += f" ({'incremental' if found.increment else 'full'} {human_bytes(found.bytes_written)})"
    if found.writing:
        text += f"; writing {found.writing}: {found.images}/{found.buckets}"
    if found.given_up:
        text += f"; {found.given_up} given up"
    return text


def protection_text(found: ProtectionStatus) -> str:
    """``parity 4+1: 52 of 64 buckets protected, 12 not; 11 rebuilding; 3 moving; 2 mirrors being made``."""
    buckets = found.full + found.less + found.none
    if found.parity in ("", "0"):
        text = "parity off"
    else:
        kind = f"parity {found.parity}" + (" eager" if found.protect == "eager" else "")
        text = f"{kind}: {found.full} of {buckets} buckets protected"
        text += f", {found.less} less" if found.less else ""
        text += f", {found.none} not" if found.none else ""
    if found.rebuilding:
        text += f"; {found.rebuilding} rebuilding"
    text += f"; {found.moving} moving" if found.moving else ""
    text += f"; {found.building} mirrors being made" if found.building else ""
    if found.done_share > 0:
        text += f" ({found.done_share:.0%}" + (f", {found.left_s:.0f} s left)" if found.left_s >= 0 else ")")
    return text


def group_text(found: GroupStatus) -> str:
    """``group 5: 3 workers, step 1,204, 12.3 steps/s; 1 joining; on hold: ...``."""
    text = (
        f"group {found.generation}: {found.members} workers, step {count(found.step)}, {found.steps_per_s:.1f} steps/s"
    )
    text += f", {found.logical_workers} logical workers" if found.logical_workers else ""
    text += ", fixed batch" if found.strategy == "fixed" and not found.logical_workers else ""
    text += f"; {found.joining} joining" if found.joining else ""
    text += f"; on hold: {found.hold}" if found.hold else ""
    text += f"; {count(found.voided)} steps were done again" if found.voided else ""
    return text


def current_epoch(status: StatusReport) -> int | None:
    """Index in ``status.epochs`` of the one being trained: the first that is not done, else the last."""
    for index, epoch in enumerate(status.epochs):
        if epoch.done < epoch.shards:
            return index
    return len(status.epochs) - 1 if status.epochs else None


def progress_line(status: StatusReport) -> str:
    """One plain line for a log."""
    parts = []
    index = current_epoch(status)
    if index is None:
        parts.append(status.phase)
    else:
        epoch = status.epochs[index]
        share = 100.0 * epoch.samples_done / epoch.samples if epoch.samples else 100.0
        parts.append(f"{epoch.dataset} epoch {epoch.epoch + 1}/{max(epoch.epochs, epoch.epoch + 1)} {share:.1f}%")
        parts.append(f"{count(status.samples_per_s)} samples/s")
        eta = eta_s(status)
        if eta is not None:
            parts.append(f"ETA {clock(eta)}")
    if status.values:
        parts.append(values_text(status.values))
    if status.group is not None:
        parts.append(group_text(status.group))
    if status.protection is not None:
        parts.append(protection_text(status.protection))
    if status.checkpoint is not None:
        parts.append(checkpoint_text(status.checkpoint, status.at))
    for role in ("worker", "ps"):
        members = [m for m in status.members if m.role == role and m.state != "left"]
        if members:
            parts.append(f"{role} {sum(m.state == 'alive' for m in members)}/{len(members)}")
    return "  ".join(parts)


# ---------------------------------------------------------------- screens


class PlainScreen:
    """Lines only: events at once, progress every few seconds."""

    def __init__(self, out: TextIO, every_s: float = PLAIN_EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._every_s = every_s
        self._now = now
        self._next = now() + every_s

    def line(self, text: str, kind: str, at: float = 0.0) -> None:
        self._print(text if kind == "script" else f"[{time_of_day(at)}] {escaped_lines(text)}")

    def picture(self, status: StatusReport) -> None:
        if self._now() >= self._next:
            self._next = self._now() + self._every_s
            self._print(f"[{time_of_day()}] {progress_line(status)}")

    def close(self) -> None:
        self._out.flush()

    def _print(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


class LiveScreen:
    """Progress, members and values at the bottom; lines scroll above them."""

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

    def picture(self, status: StatusReport) -> None:
        self._live.update(render(status))

    def close(self) -> None:
        self._live.stop()


def render(status: StatusReport) -> RenderableType:
    """The whole picture of one status."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble((status.job, "bold"), f"  {status.phase}  {clock(status.at - status.started_at)}  ")
    head.append(f"{count(status.samples_done)} samples  {count(status.samples_per_s)} samples/s")
    if status.consistency != "async":
        head.append(f"  {status.consistency}")
    parts: list[RenderableType] = [head]
    index = current_epoch(status)
    if index is not None:
        epoch = status.epochs[index]
        grid: Any = Table.grid(padding=(0, 1))
        label = f"{epoch.dataset} epoch {epoch.epoch + 1}/{max(epoch.epochs, epoch.epoch + 1)}"
        share = 100.0 * epoch.samples_done / epoch.samples if epoch.samples else 100.0
        eta = eta_s(status)
        grid.add_row(
            label,
            ProgressBar(total=max(1, epoch.samples), completed=epoch.samples_done, width=36),
            f"{share:5.1f}%",
            f"shards {epoch.done}/{epoch.shards}" if status.group is None else f"step {count(status.group.step)}",
            f"ETA {clock(eta)}" if eta is not None else "",
        )
        parts.append(grid)
    if status.values:
        parts.append(Text(values_text(status.values)))
    parts.append(members_table(status))
    if status.group is not None:
        parts.append(Text(group_text(status.group), "yellow" if status.group.hold else "dim"))
    if status.protection is not None:
        style = "dim" if status.protection.full and not (status.protection.less or status.protection.none) else "yellow"
        parts.append(Text(protection_text(status.protection), style))
    if status.checkpoint is not None:
        parts.append(Text(checkpoint_text(status.checkpoint, status.at), "dim"))
    failures = failures_text(status.failures)
    if failures or status.batches_retried:
        parts.append(Text(f"survived: {failures or 'nothing yet'}  {status.batches_retried} batches retried", "dim"))
    return Group(*parts)


def members_table(status: StatusReport) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("member", "state", "#", "pid", "node", "samples/s", "works on"):
        table.add_column(column, justify="right" if column in ("#", "pid", "samples/s") else "left")
    for m in sorted(status.members, key=lambda m: (m.role, m.slot)):
        table.add_row(
            f"{m.role}:{m.slot}",
            Text(m.state, _STATE_COLOURS.get(m.state, "")),
            str(m.incarnation),
            str(m.pid or ""),
            m.node,
            count(m.samples_per_s) if m.samples_per_s else "",
            m.shard or held_text(m),
        )
    return table


def held_text(member: MemberStatus) -> str:
    """What a ps has: ``11 buckets, 3 mirrors``."""
    parts = [f"{member.buckets} buckets"] if member.buckets else []
    parts += [f"{member.mirrors} mirrors"] if member.mirrors else []
    return ", ".join(parts)


def failures_text(failures: dict[str, int]) -> str:
    """``2 worker, 1 master``; "" if there were none."""
    return ", ".join(f"{n} {role}" for role, n in sorted(failures.items()) if n)


def make_screen(live: bool, out: TextIO | None = None) -> Screen:
    """A live screen where ``out`` (stdout) is a terminal and ``live`` is wanted, else plain lines."""
    stream = out or sys.stdout
    if live and stream.isatty():
        return LiveScreen(stream)
    return PlainScreen(stream)


# ---------------------------------------------------------------- the end


class JobSummary(msgspec.Struct):
    """What ``summary.json`` says (more fields there are fine)."""

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


_summary_decoder = msgspec.json.Decoder(JobSummary)


def read_summary(run_dir: Path) -> JobSummary | None:
    try:
        return _summary_decoder.decode((run_dir / "summary.json").read_bytes())
    except (OSError, *MALFORMED):
        return None


def summary_lines(summary: JobSummary, run_dir: Path) -> list[str]:
    """The last words of a run."""
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
    if summary.trusted:
        lines.append(f"began with checkpoint {summary.trusted}, which has no code of this job: --trust-checkpoint")
    lines.append(f"run directory: {run_dir} (everstep audit {run_dir})")
    return lines
