"""Runs ``everstep simulate``: what a job would cost on machines that come and go, and when it would end."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from everstep.cli.cost import parse_at
from everstep.config.capacity import parse_capacity
from everstep.config.every import parse_every
from everstep.config.load import check_spec, load_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.master.callables import load_callable
from everstep.model.capacity import Market, Offer
from everstep.monitor.node_costs import HOUR_S, Costs, reckon
from everstep.monitor.price_files import read_prices
from everstep.monitor.prices import PriceBook
from everstep.platforms.trace_capacity import read_trace
from everstep.platforms.traces import Trace, TraceError, price_class
from everstep.policies.spot import SHIPPED, SpotPlan, SpotPolicy, SpotSeen, by_hazard, seen_hazard
from everstep.sim.elastic.forecast import Story, others, stories, virtual, work_of
from everstep.sim.elastic.job_model import NAMES, MeasuredJob, figure_lines, parse_figure
from everstep.sim.elastic.outcome import Outcome
from everstep.sim.elastic.recorded_job import RecordedJob, read_recorded
from everstep.sim.elastic.virtual_job import Work
from everstep.units import seconds

SEEDS_MAX, SETTINGS_MAX = 1000, 100
_SHORT = {"checkpoint": "checkpoint_every", "lead": "capacity_lead", "nodes": "capacity_nodes"}
OTHERS = {
    "restart": "others: restart from checkpoint, best interval",
    "restart_young": "others: restart from checkpoint, Young's interval",
    "varuna_like": "others: Varuna-like, best interval",
    "bamboo_like": "others: Bamboo-like, best interval",
    "bamboo_free": "others: Bamboo-like, redundancy free",
}


class Request(NamedTuple):
    """Is what the command line says."""

    files: tuple[Path, ...]
    flags: Mapping[str, Any]
    like: Path | None = None
    assume: tuple[str, ...] = ()
    compare: tuple[str, ...] = ()
    samples: int = 0
    epochs: int = 1
    seeds: int = 1
    limit: str = "60d"
    nodes: int = 0
    baselines: bool = False
    restart: str = "60s"
    as_played: bool = False
    prices: Path | None = None
    at: str = ""
    kind: str = ""
    spot_policy: str = ""


class Setting(NamedTuple):
    """Is one row of the comparison."""

    name: str
    spec: JobSpec
    model: MeasuredJob
    work: Work


class Row(msgspec.Struct, frozen=True):
    """Is what came of a setting, story by story. ``costs``: None where prices are not known."""

    name: str
    outcomes: tuple[Outcome, ...]
    costs: tuple[Costs, ...]
    about: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what programs read."""
        return {
            "name": self.name,
            "about": self.about,
            "ended": all(o.ended for o in self.outcomes),
            "why": next((o.why for o in self.outcomes if not o.ended), ""),
            "length_s": _numbers(o.length_s for o in self.outcomes),
            "goodput": _numbers(o.goodput for o in self.outcomes),
            "node_hours": _numbers(o.node_hours for o in self.outcomes),
            "reclaims": _numbers(float(o.reclaims) for o in self.outcomes),
            "spent_usd": _numbers(c.spent.usd for c in self.costs) if self.known else None,
            "price_part": _numbers(c.price_part for c in self.costs if c.price_part is not None)
            if self.known
            else None,
            "saved": _numbers(self.saved) if self.known else None,
            "unknown_prices": sorted({words for c in self.costs for words in c.unknown}),
            "stories": [
                {
                    "ended": o.ended,
                    "length_s": o.length_s,
                    "samples": o.samples,
                    "goodput": o.goodput,
                    "node_hours": o.node_hours,
                    "reclaims": o.reclaims,
                    "workers_lost": o.losses,
                    "events": o.events,
                    "cpu_s": o.cpu_s,
                    "spent_usd": c.spent.usd if c.spent.complete else None,
                    "saved": c.saved(o.goodput),
                }
                for o, c in zip(self.outcomes, self.costs, strict=True)
            ],
        }

    @property
    def known(self) -> bool:
        """Return whether every price is known, those on demand too."""
        return all(c.price_part is not None for c in self.costs)

    @property
    def saved(self) -> list[float]:
        """Return what was saved against on-demand machines that do the same work, story by story."""
        found = (c.saved(o.goodput) for o, c in zip(self.outcomes, self.costs, strict=True))
        return [value for value in found if value is not None]


class Report(NamedTuple):
    """Is the whole answer. ``source``: of the machines, in words. ``model``: lines about the numbers that were used."""

    source: str
    work: Work
    model: tuple[str, ...]
    rows: tuple[Row, ...]


def _numbers(values: Iterable[float]) -> dict[str, float] | None:
    found = list(values)
    if not found:
        return None
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


# ------------------------------------------------------------ what is asked


def settings_of(request: Request, recorded: RecordedJob | None) -> list[Setting]:
    """Return all rows: each file with each combination of what is compared. Raise ConfigError."""
    base = MeasuredJob()
    if recorded is not None:
        base = recorded.model(str(request.like))
    base = base.with_figures(dict(map(parse_figure, request.assume)))
    compared = [_compared(words) for words in request.compare]
    out = []
    for file in request.files or (None,):
        for chosen in itertools.product(*(values for _, values in compared)):
            names = [name for name, _ in compared]
            flags = dict(request.flags)
            model = base
            for name, value in zip(names, chosen, strict=True):
                if name in NAMES:
                    model = model.with_figures(dict([parse_figure(f"{name}={value}")]))
                else:
                    flags[_SHORT.get(name, name)] = value
            spec, _ = load_spec(file, flags, os.environ)
            words = [file.stem] if file is not None and len(request.files) > 1 else []
            words += [f"{name}={value}" for name, value in zip(names, chosen, strict=True)]
            out.append(Setting(" ".join(words) or spec.name, spec, model, _work(request, recorded, model)))
    if len(out) > SETTINGS_MAX:
        raise ConfigError(f"--compare: {len(out)} settings: at most {SETTINGS_MAX}")
    return out


def _compared(words: str) -> tuple[str, list[str]]:
    name, equals, values = words.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not found:
        raise ConfigError(f"--compare {words!r}: expected NAME=VALUE,VALUE,... such as checkpoint=60s,300s")
    return name.strip().replace("-", "_"), found


def _work(request: Request, recorded: RecordedJob | None, model: MeasuredJob) -> Work:
    if request.samples:
        return work_of(request.samples, request.epochs, model.batch_samples)
    if recorded is None:
        raise ConfigError("how much is there to train? give --samples, or --like RUN_DIR of a run of this job")
    return recorded.work()


def _source(request: Request, spec: JobSpec) -> tuple[Trace, Offer, str]:
    found = parse_capacity(spec.capacity)
    if found.kind != "trace":
        given = f"capacity = {spec.capacity!r}" if spec.capacity else "no capacity is given"
        raise ConfigError(f"{given}: everstep simulate plays recordings: --capacity trace:FILE")
    path = Path(found.rest)
    hardware, zone = price_class(path.name.removesuffix(".gz").rpartition(".")[0] or path.name)
    if request.kind:
        hardware, _, place = request.kind.partition("@")
        if not hardware:
            raise ConfigError(f"--as {request.kind!r}: expected CLASS or CLASS@ZONE")
        zone = place or zone
    return read_trace(path), Offer(hardware, zone, Market.SPOT), f"trace:{path}"


# ------------------------------------------------------------ the answer


def simulate_job(request: Request, say: Callable[[str], None] = lambda line: None) -> Report:
    """Return what comes of all settings. Raise EverstepError with one line."""
    if not 1 <= request.seeds <= SEEDS_MAX:
        raise ConfigError(f"--seeds {request.seeds}: must be from 1 to {SEEDS_MAX}")
    limit_s = seconds(request.limit)
    if not 0 < limit_s <= 1e9:
        raise ConfigError(f"--limit {request.limit!r}: expected a span such as 30d")
    restart_s = seconds(request.restart)
    recorded = read_recorded(request.like) if request.like is not None else None
    book = read_prices(request.prices) if request.prices is not None else PriceBook()
    began = parse_at(request.at)
    rows: list[Row] = []
    source, work = "", Work(1, 1, 1)
    lines: tuple[str, ...] = ()
    for setting in settings_of(request, recorded):
        spec, about = setting.spec, ""
        if parse_every(spec.checkpoint_every).batches:
            words = f"checkpoint_every = {spec.checkpoint_every!r}"
            raise ConfigError(f"{words}: everstep simulate has no single batches: give a span of time such as 10m")
        trace, offer, source = _source(request, spec)
        lines, work = tuple(figure_lines(setting.model)), setting.work
        played = (spec.capacity_speed, seconds(spec.capacity_quiet)) if request.as_played else (1.0, 0.0)
        try:
            shown = list(stories(trace, offer, request.nodes or spec.capacity_nodes, request.seeds, *played))
        except TraceError as error:
            raise ConfigError(f"--nodes {request.nodes}: {error}") from None
        if request.kind:
            spec = msgspec.structs.replace(spec, hardware=offer.hardware, zone=offer.zone)
        name = request.spot_policy or spec.spot_policy
        if (policy := _load_spot_policy(name)) is not None:
            spec, about = _planned(policy, name, spec, setting.model, shown[0])
        lead_s = seconds(spec.capacity_lead)
        say(setting.name)
        found = [
            virtual(spec, setting.work, setting.model, story, lead_s, limit_s, seed) for seed, story in enumerate(shown)
        ]
        rows.append(_row(setting.name, found, shown, book, began, about))
        if request.baselines:
            rows += _others(setting, spec, shown, limit_s, restart_s, book, began, say)
    return Report(source, work, lines, tuple(rows))


def _load_spot_policy(name: str) -> SpotPolicy | None:
    if name in ("", "none"):
        return None
    if name == "hazard":
        return by_hazard
    where = f"--spot-policy {name!r}"
    module, colon, attribute = name.partition(":")
    if not colon or not attribute or not module:
        raise ConfigError(f"{where}: expected {', '.join(SHIPPED)}, or module:callable")
    try:
        found: SpotPolicy = load_callable(name, Path())
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    return found


def _planned(policy: SpotPolicy, name: str, spec: JobSpec, model: MeasuredJob, story: Story) -> tuple[JobSpec, str]:
    """Return the job as its spot policy wants it, and what that was, in words. It has seen the whole first story."""
    trace = story.trace
    spans = [(life.begin_s, life.end_s) for life in trace.lives]
    hazard = seen_hazard(spans, max(trace.length_s, 1.0))
    home_stays = Market(spec.market) is Market.ON_DEMAND and bool(spec.workers or not spec.grouped)
    seen = SpotSeen(
        hazard=hazard,
        machines=spec.workers + hazard.held_s / max(trace.length_s, 1.0),
        ps=spec.ps if spec.capacity_ps else 0,
        state_bytes=model.figures["state_bytes"].value,
        write_s=model.write_s(full=True),
        stall=model.stall,
        restart_s=model.agent_s + model.fork_s,
        protecting=model.protecting,
        saves_itself=spec.grouped or not spec.capacity_ps,
        stays=home_stays and not (spec.ps and spec.capacity_ps),
    )
    try:
        plan = policy(seen)
    except Exception as error:
        raise ConfigError(f"--spot-policy {name!r}: it raised {type(error).__name__}: {error}") from None
    if not isinstance(plan, SpotPlan) or not plan.interval_s >= 0:
        raise ConfigError(f"--spot-policy {name!r}: it returned {plan!r}: expected a SpotPlan with interval_s >= 0")
    every = f"{max(1.0, plan.interval_s):.0f}s" if plan.interval_s else ""
    parity = plan.parity or spec.parity
    spec = msgspec.structs.replace(spec, checkpoint_every=every, parity=parity, spot_policy="none")
    check_spec(spec)
    words = f"{name}: a checkpoint every {every or 'never'}, parity {spec.parity}, {plan.safe_ps} ps safe: {plan.why}"
    return spec, words


def _others(
    setting: Setting,
    spec: JobSpec,
    shown: Sequence[Story],
    limit_s: float,
    restart_s: float,
    book: PriceBook,
    began: float | None,
    say: Callable[[str], None],
) -> list[Row]:
    say(f"{setting.name}: others")
    ruled = [others(spec, setting.work, setting.model, story, limit_s, restart_s) for story in shown]
    rows = []
    for name, words in OTHERS.items():
        found = [r[name] for r in ruled]
        spans = sorted({f"{r.rule.interval_s:.0f} s" for r in found})
        about = f"a checkpoint every {', '.join(spans)}; newcomers {found[0].rule.joins}; restart in {restart_s:g} s"
        rows.append(_row(words, [r.outcome for r in found], shown, book, began, about))
    return rows


def _row(
    name: str, found: Sequence[Outcome], shown: Sequence[Story], book: PriceBook, began: float | None, about: str = ""
) -> Row:
    at = 0.0 if began is None else began
    costs = tuple(
        reckon(outcome.machines, (), book, at + story.begins_s) for outcome, story in zip(found, shown, strict=True)
    )
    return Row(name, tuple(found), costs, about)


def report_lines(report: Report) -> list[str]:
    """Return the lines for people."""
    work = report.work
    passes = f" in {work.epochs} passes" if work.epochs > 1 else ""
    lines = [f"{work.samples:,} samples{passes} on machines of {report.source}", ""]
    width = max(len("setting"), *(len(row.name) for row in report.rows))
    lines.append(f"{'setting':<{width}}  {'ends after':>22}  {'goodput':>20}  {'reclaims':>9}  spent, saved")
    for row in report.rows:
        ends = _between([o.length_s / HOUR_S for o in row.outcomes], "{:.2f}") + " h"
        if not all(o.ended for o in row.outcomes):
            ends = "not over"
        good = _between([o.goodput for o in row.outcomes], "{:.3f}")
        reclaims = f"{statistics.median([o.reclaims for o in row.outcomes]):.0f}"
        lines.append(f"{row.name:<{width}}  {ends:>22}  {good:>20}  {reclaims:>9}  {_money(row)}")
    lines += [f"  {row.name}: {row.about}" for row in report.rows if row.about]
    lines += [f"  {row.name}: {o.why}" for row in report.rows for o in row.outcomes if o.why]
    unknown = sorted({words for row in report.rows for cost in row.costs for words in cost.unknown})
    lines += [f"  unknown: {words}: name it in a file of prices (--prices)" for words in unknown]
    return [*lines, "", "the job (--assume NAME=VALUE, --like RUN_DIR):", *(f"  {line}" for line in report.model)]


def _between(values: Sequence[float], form: str) -> str:
    middle = form.format(statistics.median(values))
    if len(values) < 2:
        return middle
    return f"{middle} ({form.format(min(values))} .. {form.format(max(values))})"


def _money(row: Row) -> str:
    if not row.known:
        hours = statistics.median([o.node_hours for o in row.outcomes])
        return f"unknown, {hours:,.1f} node-hours"
    parts = [c.price_part for c in row.costs if c.price_part is not None]
    usd = _between([c.spent.usd for c in row.costs], "{:,.2f}")
    saved = 100 * statistics.median(row.saved) if row.saved else math.nan
    good = statistics.median([o.goodput for o in row.outcomes])
    return f"{usd} USD, {saved:.1f} % = 1 - price {statistics.median(parts):.3f} / goodput {good:.3f}"


def show_simulation(request: Request, as_json: bool, out: Path | None, say: Callable[[str], None]) -> str:
    """Return what ``everstep simulate`` prints; write the picture where ``out`` names one. Raise EverstepError."""
    if out is not None and out.suffix != ".svg":
        raise ConfigError(f"--out {str(out)!r}: pictures are SVG: name a file that ends in .svg")
    report = simulate_job(request, say)
    if out is not None:
        from everstep.cli.simulate_picture import picture

        try:
            out.write_text(picture(report))
        except OSError as error:
            raise ConfigError(f"--out {str(out)!r}: cannot be written: {error.strerror or error}") from None
    if not as_json:
        return "\n".join(report_lines(report))
    whole = {
        "source": report.source,
        "samples": report.work.samples,
        "model": list(report.model),
        "settings": [row.as_dict() for row in report.rows],
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode()
