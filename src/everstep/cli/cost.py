"""Runs ``everstep cost``: what a run has spent, what on-demand machines would have cost, and what one sample cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from everstep.brain.events import Event
from everstep.cli.replay import JOURNAL_FILE
from everstep.cli.restart_cost import RestartCost, restart_cost
from everstep.errors import ConfigError, escaped
from everstep.monitor.node_costs import HOUR_S, Costs, MachineSpan, NodeSum, reckon
from everstep.monitor.price_files import read_prices
from everstep.monitor.prices import PriceBook, moment
from everstep.monitor.spending import Spending, read_spending
from everstep.storage.journal import read_journal

_HOURS_SHOWN = 48
_NO_RESTART = "  restart from checkpoint, the same work: unknown: the run trained too little to tell how fast it was"
_ROLES = ("master", "ps", "worker", "nobody")


class CostReport(msgspec.Struct, frozen=True):
    """Holds what a run cost. ``clock``: "recorded" where a recorded cloud was played, else "passed". ``length_s``: of
    the job on that clock. ``goodput``: as ``docs/cost.md`` defines it; None: no worker had a place."""

    run_dir: str
    over: bool
    clock: str
    length_s: float
    passed_s: float
    samples: int
    machines: tuple[MachineSpan, ...]
    costs: Costs
    goodput: float | None
    restart: RestartCost | None = None

    @property
    def saved(self) -> float | None:
        """See ``Costs.saved``."""
        return self.costs.saved(self.goodput)

    @property
    def per_sample(self) -> float | None:
        """Return USD; None: a price is not known, or nothing was trained."""
        return self.costs.spent.usd / self.samples if self.samples and self.costs.spent.complete else None

    @property
    def same_work(self) -> float | None:
        """Return what on-demand machines would have cost for the same work."""
        full = self.costs.on_demand
        return full.usd * self.goodput if full.complete and self.goodput is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return all for programs: what is not known is null."""
        costs = self.costs
        return {
            "run_dir": self.run_dir,
            "over": self.over,
            "clock": self.clock,
            "length_s": self.length_s,
            "passed_s": self.passed_s,
            "samples": self.samples,
            "spent": _sum(costs.spent),
            "on_demand_same_time": _sum(costs.on_demand),
            "on_demand_same_work_usd": self.same_work,
            "price_part": costs.price_part,
            "goodput_part": self.goodput,
            "saved": self.saved,
            "usd_per_sample": self.per_sample,
            "restart": self.restart.as_dict() if self.restart is not None else None,
            "roles": {role: _sum(found) for role, found in costs.roles.items()},
            "hours": [_sum(found) for found in costs.hours],
            "role_hours": {role: [_sum(found) for found in some] for role, some in costs.role_hours.items()},
            "nodes": {node: _sum(found) for node, found in costs.nodes.items()},
            "machines": [m._asdict() for m in self.machines],
            "unknown": costs.unknown,
        }


def _sum(of: NodeSum) -> dict[str, float | None]:
    return {
        "node_hours": of.seconds / HOUR_S,
        "usd": of.usd if of.complete else None,
        "usd_known": of.usd,
        "node_hours_unknown": of.unknown_s / HOUR_S,
    }


def cost_of(
    run_dir: Path, prices: PriceBook, at: float | None = None, kind: tuple[str, str] | None = None
) -> CostReport:
    """Return what a run has cost until now, or until its end. ``at``: the time of the price book, seconds since 1970,
    at which the job began; None: when it began here. ``kind``: class and zone ("": its own) as which every machine is
    reckoned; None: as what it is. Raise ConfigError or PlatformError."""
    found = read_spending(_events(run_dir))
    report = report_of(found, run_dir, prices, at, kind)
    return msgspec.structs.replace(report, restart=restart_cost(_events(run_dir), found, report.costs))


def _events(run_dir: Path) -> Iterator[Event]:
    return (event for _, event, _ in read_journal(run_dir / JOURNAL_FILE))


def report_of(
    found: Spending,
    run_dir: Path,
    prices: PriceBook,
    at: float | None = None,
    kind: tuple[str, str] | None = None,
) -> CostReport:
    """Do as ``cost_of``, of a journal that was read."""
    clock = found.clock()
    machines = found.machines(clock)
    if kind is not None:  # (what a source said of its price is of another kind)
        machines = [m._replace(hardware=kind[0], zone=kind[1] or m.zone, usd=None) for m in machines]
    costs = reckon(machines, found.members(clock), prices, found.began if at is None else at)
    return CostReport(
        run_dir=str(run_dir),
        over=found.brain.job.over,
        clock="recorded" if found.played else "passed",
        length_s=clock.at(found.ended),
        passed_s=found.ended - found.began,
        samples=found.brain.shards.samples_done,
        machines=tuple(machines),
        costs=costs,
        goodput=found.goodput(),
    )


def cost_lines(report: CostReport) -> list[str]:
    """Return the lines for people."""
    costs, spent = report.costs, report.costs.spent
    state = "" if report.over else ", which is not over"
    lines = [f"cost of {report.run_dir}{state}"]
    if report.clock == "recorded":
        lines.append(
            f"  time: {_span(report.length_s)} of the recording, played in {_span(report.passed_s)}; it is paid by the "
            "recording's time"
        )
    else:
        lines.append(f"  time: {_span(report.length_s)}")
    lines.append(f"  spent: {_usd(spent)} for {spent.seconds / HOUR_S:.2f} node-hours")
    lines.append(f"  on demand, the same machines for the same time: {_usd(costs.on_demand)}")
    work = "unknown" if report.same_work is None else f"{report.same_work:.4f} USD"
    lines.append(f"  on demand, the same work: {work}")
    part = "unknown" if costs.price_part is None else f"{costs.price_part:.3f}"
    good = "unknown" if report.goodput is None else f"{report.goodput:.3f}"
    saved = "unknown" if report.saved is None else f"{100 * report.saved:.1f} %"
    lines.append(f"  saved: {saved} = 1 - price part {part} / goodput part {good}")
    lines.append(f"  {report.restart.line()}" if report.restart is not None else _NO_RESTART)
    one = "unknown" if report.per_sample is None else f"{report.per_sample * 1e6:.4g} USD for a million"
    lines.append(f"  samples: {report.samples:,}, {one}")
    if costs.roles:
        lines.append("  by role:")
        lines += [
            f"    {role:<8} {found.seconds / HOUR_S:10.2f} node-hours  {_usd(found)}"
            for role in sorted(costs.roles, key=_ROLES.index)
            for found in (costs.roles[role],)
        ]
    if costs.hours:
        lines.append("  by hour:")
        shown = costs.hours[:_HOURS_SHOWN]
        lines += [
            f"    {n:>4} {h.seconds / HOUR_S:10.2f} node-hours  {_usd(h)}{_of_roles(costs, n)}"
            for n, h in enumerate(shown)
        ]
        if len(costs.hours) > len(shown):
            lines.append(f"    ... {len(costs.hours) - len(shown)} more hours (--json has all)")
    lines += [f"  unknown: {escaped(text)}: name it in a file of prices (--prices)" for text in costs.unknown]
    return lines


def _of_roles(costs: Costs, hour: int) -> str:
    """Return what each role has of an hour; "": nothing that has a price."""
    found = {role: costs.role_hours[role][hour] for role in sorted(costs.role_hours, key=_ROLES.index)}
    parts = [f"{role} {of.usd:.4f}" for role, of in found.items() if of.usd]
    return f"  ({', '.join(parts)})" if parts else ""


def _usd(of: NodeSum) -> str:
    if of.complete:
        return f"{of.usd:.4f} USD"
    known = f"{of.usd:.4f} USD and " if of.unknown_s < of.seconds else ""
    return f"{known}{of.unknown_s / HOUR_S:.2f} node-hours of unknown price"


def _span(seconds: float) -> str:
    return f"{seconds / HOUR_S:.2f} h" if seconds >= HOUR_S else f"{seconds:.0f} s"


def parse_at(text: str) -> float | None:
    """Return the time that ``--at`` names; None: none. Raise ConfigError."""
    if not text:
        return None
    try:
        return moment(text)
    except ValueError:
        raise ConfigError(f"--at {text!r}: expected a time such as 2015-06-01T00:00:00Z") from None


def show_cost(run_dir: Path, as_json: bool, prices: Path | None, at: str, out: Path | None, kind: str = "") -> str:
    """Return what ``everstep cost`` prints; write the picture where ``out`` names one. Raise EverstepError."""
    began = parse_at(at)
    if out is not None and out.suffix != ".svg":
        raise ConfigError(f"--out {str(out)!r}: pictures are SVG: name a file that ends in .svg")
    hardware, _, zone = kind.partition("@")
    if kind and not hardware:
        raise ConfigError(f"--as {kind!r}: expected CLASS or CLASS@ZONE")
    book = read_prices(prices) if prices is not None else PriceBook()
    report = cost_of(run_dir, book, began, (hardware, zone) if kind else None)
    if out is not None:
        from everstep.cli.cost_picture import picture

        try:
            out.write_text(picture(report))
        except OSError as error:
            raise ConfigError(f"--out {str(out)!r}: cannot be written: {error.strerror or error}") from None
    if as_json:
        return msgspec.json.format(msgspec.json.encode(report.as_dict()), indent=2).decode()
    return "\n".join(cost_lines(report))
