"""Runs ``everstep graph``: the model as a tree, the tables, and what binds the job, running or ended."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from everstep.agent.rundir import in_use
from everstep.cli.link import ask_view
from everstep.cli.rundirs import open_run_dir
from everstep.cli.top import span
from everstep.cli.view_text import keys_text
from everstep.errors import ConfigError
from everstep.model.graph_readings import GraphView, ModuleView, TableView
from everstep.model.partition_load import PartitionView
from everstep.monitor.graph_file import GRAPH_FILE, GraphRecord
from everstep.storage.atomic import write_atomic
from everstep.units import human_bytes

_decoder = msgspec.json.Decoder(GraphRecord)


def show_graph(run_dir: Path, as_json: bool, out: Path | None) -> None:
    """Show the readings of a job. Raises ConfigError: it has none."""
    spec = open_run_dir(run_dir)
    record = read_graph(run_dir)
    if record is None:
        off = spec.graph_every == "off"
        why = "graph_every is off" if off else "no step has been sampled yet; the first is the tenth of a worker"
        raise ConfigError(f"run directory {run_dir}: no readings of the model: {why}")
    if out is not None:
        from everstep.cli.graph_picture import draw

        write_atomic(out, draw(record, spec.name).encode())
        click.echo(f"wrote {out}")
    elif as_json:
        click.echo(json.dumps(msgspec.to_builtins(record)))
    else:
        for line in lines(record):
            click.echo(line)


def read_graph(run_dir: Path) -> GraphRecord | None:
    """Return what the master knows now, or what it left behind; None: nothing. Raises ConfigError: it is damaged."""
    if in_use(run_dir):
        view = ask_view(run_dir, speed=True, graph=True)
        if view.graph is not None:
            binding = view.speed.binding if view.speed is not None else None
            hottest = view.placement.hottest if view.placement is not None else ()
            return GraphRecord(at=view.at, graph=view.graph, binding=binding, hottest=hottest)
    path = run_dir / GRAPH_FILE
    try:
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or from another version: {error}") from None


MODULE_HEAD = ("module", "class", "calls", "forward", "own", "backward", "parameters", "memory", "outputs")
TABLE_HEAD = ("table", "rows", "memory", "rows/s", "hits", "admitted", "ids", "unique", "update/row", "hottest keys")

PARTITION_HEAD = ("partition", "ps", "of its load", "requests/s", "rows/s", "bytes", "time", "holds", "hottest keys")


def lines(record: GraphRecord) -> list[str]:
    """Return the readings as plain text."""
    graph = record.graph
    out = [headline(graph)]
    if record.binding is not None:
        out.append(record.binding.words)
    out += graph.notes
    if graph.left_out:
        out.append(f"{graph.left_out} modules are not shown: they count for the module that they are in")
    if graph.modules:
        out += ["", *_table([MODULE_HEAD, *(module_row(m) for m in graph.modules)])]
    if graph.tables:
        out += ["", *_table([TABLE_HEAD, *(table_row(t) for t in graph.tables)])]
    if record.hottest:
        out += ["", *_table([PARTITION_HEAD, *(partition_row(p) for p in record.hottest)])]
    return out


def headline(graph: GraphView) -> str:
    """Return ``12 steps of 2 workers sampled (one in 340, 0.19 % of the time): 8.1 ms each``."""
    if not graph.steps:
        return "no step of a worker has been sampled yet"
    workers = f"{graph.workers} worker" + ("s" if graph.workers != 1 else "")
    often = f"one in {graph.every}, {100 * graph.cost_share:.2f} % of the time"
    steps = f"{graph.steps} step" + ("s" if graph.steps != 1 else "")
    return f"{steps} of {workers} sampled ({often}): {span(graph.step_s)} each"


def module_row(m: ModuleView) -> tuple[str, ...]:
    """Return the cells of one module, by ``MODULE_HEAD``."""
    name = m.module.rpartition(".")[2] if m.depth else m.module
    called = m.calls > 0
    return (
        "  " * m.depth + name,
        m.kind,
        f"{m.calls:g}" if called else "not called",
        span(m.forward_s) if called else "",
        span(m.own_s) if called else "",
        span(m.backward_s) if called else "",
        f"{m.parameters:,}" if m.parameters else "",
        human_bytes(m.parameter_bytes) if m.parameters else "",
        human_bytes(int(m.output_bytes)) if called else "",
    )


def table_row(t: TableView) -> tuple[str, ...]:
    """Return the cells of one table, by ``TABLE_HEAD``."""
    hottest = ", ".join(f"{key} ({100 * share:.2g} %)" for key, share in t.hottest[:3])
    return (
        t.table,
        f"{t.rows:,}",
        human_bytes(t.bytes),
        f"{t.rows_per_s:+,.0f}" if t.rows_per_s else "-",
        _percent(t.hit_share),
        _percent(t.admitted_share),
        f"{t.ids:,.0f}" if t.ids else "",
        _percent(t.unique_share),
        f"{t.update_norm / t.row_norm:.2g}" if t.row_norm else "-",
        hottest,
    )


def partition_row(p: PartitionView) -> tuple[str, ...]:
    """Return the cells of one of the hottest partitions, by ``PARTITION_HEAD``."""
    return (
        f"{p.partition}" + (" (more than a ps should have)" if p.alone else ""),
        f"ps:{p.ps}",
        f"{100 * p.ps_share:.0f} %",
        f"{p.requests_per_s:,.0f}",
        f"{p.rows_per_s:,.0f}",
        f"{human_bytes(int(p.bytes_per_s))}/s",
        f"{100 * p.service_share:.1f} %",
        human_bytes(p.held_bytes),
        keys_text(p),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0 else "-"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
