"""Runs ``everstep top``: who is slow and why, slowest first, as long as one looks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from everstep.agent.rundir import in_use
from everstep.cli.link import ask_view
from everstep.cli.rundirs import open_run_dir
from everstep.cli.view_text import cold_text, partition_text
from everstep.errors import ConfigError, EverstepError
from everstep.model.job_view import JobView, Judged
from everstep.model.observation import ServerSeen, WorkerSeen
from everstep.monitor.slowness import fault_words
from everstep.units import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

EVERY_S = 1.0
LIVE_S = 3.0  # the live table waits no longer for the master
_COMPUTE = ("forward", "backward", "update")


def top(run_dir: Path, once: bool, as_json: bool) -> None:
    """Show the table until Ctrl-C or the job's end; ``once``: one picture. Raises ConfigError: it is not running."""
    open_run_dir(run_dir)
    if not in_use(run_dir):
        raise ConfigError(
            f"run directory {run_dir}: this job is not running; how fast its members were is in "
            f"{run_dir}/members.jsonl, what was decided in everstep explain {run_dir}"
        )
    if once or as_json:
        view = ask_view(run_dir, speed=True)
        if as_json:
            click.echo(json.dumps(msgspec.to_builtins(view.speed)))
            return
        for line in lines(view):
            click.echo(line)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    newest: JobView | None = None
    answered_at = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                newest = ask_view(run_dir, speed=True, timeout_s=LIVE_S)
                answered_at = time.monotonic()
                live.update(table(newest, console.width), refresh=True)
            except EverstepError as error:
                if not in_use(run_dir):  # else its master is coming back
                    break
                silent_s = time.monotonic() - answered_at
                live.update(table(newest, console.width, silent_s) if newest is not None else str(error), refresh=True)
            time.sleep(EVERY_S)
    click.echo("the job has ended")


HEAD = ("member", "slower", "per sample", "compute", "waits", "queue", "cpu", "throttled", "memory", "node", "why")


def rows(view: JobView) -> list[tuple[str, ...]]:
    """Return the cells of the table, by ``HEAD``; slowest member first."""
    speed = view.speed
    if speed is None:
        return []
    members: dict[str, WorkerSeen | ServerSeen] = {str(w): w for w in speed.seen.workers}
    members.update({str(s): s for s in speed.seen.servers})
    return [_row(j, members[j.member]) for j in speed.judged]


def _row(j: Judged, m: WorkerSeen | ServerSeen) -> tuple[str, ...]:
    compute = waits = queue = ""
    if isinstance(m, WorkerSeen):
        total = sum(v for k, v in m.short.phases.items() if k != "outside")
        if total > 0:
            own = sum(m.short.phases.get(p, 0.0) for p in _COMPUTE) / total
            compute, waits = f"{own:.0%}", f"{1 - own:.0%}"
    else:
        queue = f"{m.queue:.1f}"
    return (
        j.member,
        f"{j.slowness:.2f}x" if j.slowness else "-",
        span(j.seconds),
        compute,
        waits,
        queue,
        f"{m.cpu_share:.2f}",
        f"{m.throttled_share:.0%}",
        human_bytes(m.rss_bytes),
        m.node,
        j.why,
    )


def lines(view: JobView) -> list[str]:
    """Return the table as plain text."""
    return [headline(view), *aligned([dict(zip(HEAD, row, strict=True)) for row in rows(view)])]


def aligned(members: Sequence[Mapping[str, str]]) -> list[str]:
    """Return lines of a table whose columns are ``HEAD``; a member says of itself what it has."""
    cells = [HEAD, *(tuple(str(member.get(name, "")) for name in HEAD) for member in members)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def headline(view: JobView) -> str:
    """Return ``mode ps, 2 of 3 workers, 1 ps, about 60 s left; faults: ...; readings dropped: 2 negative``."""
    assert view.speed is not None
    seen, speed = view.speed.seen, view.speed
    text = f"mode {view.mode}, {len(seen.workers)} of {view.members_wanted.get('worker', 0)} workers"
    text += f", {len(seen.servers)} ps"
    if seen.remaining_s > 0:
        text += f", about {seen.remaining_s:.0f} s left"
    if speed.binding is not None:
        text += f"; {speed.binding.words}"
    if view.placement is not None:
        text += "".join(f"; {partition_text(one)}" for one in view.placement.hottest if one.alone)
    text += f"; {cold}" if (cold := cold_text(view)) else ""
    if speed.faults:
        text += "; faults: " + ", ".join(f"{d.target} {fault_words(d, seen.at)}" for d in speed.faults)
    if speed.dropped:
        text += "; readings dropped: " + ", ".join(f"{n} {why}" for why, n in sorted(speed.dropped.items()))
    return text


NARROW = 110  # columns of a terminal; in fewer, what ``why`` tells in words anyway is left out
_LEFT_OUT = ("waits", "throttled", "memory", "node")


def table(view: JobView, width: int = 200, silent_s: float = 0.0) -> Table:
    """Return the table for a terminal of ``width`` columns. ``silent_s``: so long ago the master answered so, and not
    since."""
    from rich.markup import escape
    from rich.table import Table

    shown = [i for i, name in enumerate(HEAD) if width >= NARROW or name not in _LEFT_OUT]
    title = headline(view)
    if silent_s > 0:
        title = f"no answer of the master since {silent_s:.0f} s; until then: {title}"
    out = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for i in shown:
        out.add_column(HEAD[i], no_wrap=HEAD[i] != "why")
    for row in rows(view):
        out.add_row(*(escape(row[i]) for i in shown))
    return out


def span(seconds: float) -> str:
    """Return a short time for people: 1.23 ms."""
    if seconds <= 0:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
