"""Makes one view of what workers and ps tell of the model and the tables. Pure; time is passed in.

The readings of a process count for as long as the job lives, also when it has ended: the view is of the job's model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from everstep.ids import Incarnation, Slot
from everstep.model.graph_readings import (
    HOTTEST,
    TABLES_MAX,
    GraphReading,
    GraphView,
    ModuleReading,
    ModuleView,
    RowReading,
    TableView,
)
from everstep.model.member import MemberKey, Role

GROWTH_S: Final = 60.0
"""Over so long the growth of a table is measured."""


class _Reported(NamedTuple):
    incarnation: Incarnation
    graph: GraphReading | None = None
    rows: tuple[RowReading, ...] = ()


class GraphFold:
    """Holds the newest readings of each process. ``take`` them as they come; ``view`` at any time."""

    def __init__(self) -> None:
        self._newest: dict[MemberKey, _Reported] = {}
        self._grown: dict[str, deque[tuple[float, int]]] = {}  # by table: when, rows of all ps

    def __repr__(self) -> str:
        return f"<GraphFold of {len(self._newest)} processes>"

    def take(
        self,
        key: MemberKey,
        incarnation: Incarnation,
        graph: GraphReading | None,
        rows: tuple[RowReading, ...],
        at: float,
    ) -> bool:
        """Take what a beat has; return whether it had anything. ``at``: seconds."""
        if graph is None and not rows:
            return False
        known = self._newest.get(key)
        if known is not None and known.incarnation > incarnation:
            return False
        self._newest[key] = _Reported(incarnation, graph, rows[:TABLES_MAX])
        if rows:
            self._grow(at)
        return True

    def gone(self, ps: Iterable[Slot]) -> None:
        """Forget the rows of ps that are no more: others have them."""
        for slot in ps:
            self._newest.pop(MemberKey(Role.PS, slot), None)

    def _grow(self, at: float) -> None:
        for table, (rows, _) in _rows_of(self._ps()).items():
            seen = self._grown.setdefault(table, deque())
            seen.append((at, rows))
            while len(seen) > 2 and seen[1][0] <= at - GROWTH_S:
                seen.popleft()

    def _ps(self) -> list[RowReading]:
        return [row for one in self._newest.values() for row in one.rows]

    def _workers(self) -> list[GraphReading]:
        return [t.graph for t in self._newest.values() if t.graph is not None and t.graph.steps > 0]

    def view(self) -> GraphView | None:
        """Return the view; None: nobody has told anything."""
        workers = self._workers()
        if not self._newest:
            return None
        steps = sum(w.steps for w in workers)
        return GraphView(
            workers=len(workers),
            every=min((w.every for w in workers if w.every), default=0),
            steps=steps,
            step_s=sum(w.step_s * w.steps for w in workers) / steps if steps else 0.0,
            cost_share=max((w.cost_share for w in workers), default=0.0),
            left_out=max((w.left_out for w in workers), default=0),
            notes=tuple(sorted({w.note for w in workers if w.note})),
            modules=_modules(workers),
            tables=self._tables(workers),
        )

    def _tables(self, workers: Sequence[GraphReading]) -> tuple[TableView, ...]:
        found = self._ps()
        names = dict.fromkeys([row.table for row in found] + [one.table for w in workers for one in w.lookups])
        tables = [self._table(name, [r for r in found if r.table == name], workers) for name in names]
        return tuple(sorted(tables, key=lambda t: (t.dense, -t.bytes, t.table))[:TABLES_MAX])

    def _table(self, name: str, rows: Sequence[RowReading], workers: Sequence[GraphReading]) -> TableView:
        lookups = [(w.steps, one) for w in workers for one in w.lookups if one.table == name]
        keys, hits = sum(r.keys for r in rows), sum(r.hits for r in rows)
        admitted = sum(r.admitted for r in rows)
        ids = sum(n * one.ids for n, one in lookups)
        unique = sum(n * one.unique for n, one in lookups)
        share: dict[int, float] = {}
        for n, one in lookups:
            for key, part in one.hottest:
                share[key] = share.get(key, 0.0) + (part * n * one.ids / ids if ids else 0.0)
        hottest = sorted(share.items(), key=lambda item: (-item[1], item[0]))[:HOTTEST]
        return TableView(
            table=name,
            rows=sum(r.rows for r in rows),
            bytes=sum(r.rows * r.row_bytes for r in rows),
            rows_per_s=self._rows_per_s(name),
            hit_share=hits / keys if keys else -1.0,
            admitted_share=admitted / (keys - hits) if keys > hits else -1.0,
            unique_share=unique / ids if ids else -1.0,
            ids=ids / steps if (steps := sum(n for n, _ in lookups)) else 0.0,
            update_norm=sum(r.keys * r.update_norm for r in rows) / keys if keys else 0.0,
            row_norm=sum(r.keys * r.row_norm for r in rows) / keys if keys else 0.0,
            hottest=tuple(hottest),
            dense=any(r.dense for r in rows),
        )

    def _rows_per_s(self, table: str) -> float:
        seen = self._grown.get(table)
        if not seen or seen[-1][0] <= seen[0][0]:
            return 0.0
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def _rows_of(rows: Iterable[RowReading]) -> dict[str, tuple[int, int]]:
    """Return rows and bytes by table."""
    out: dict[str, tuple[int, int]] = {}
    for row in rows:
        known = out.get(row.table, (0, 0))
        out[row.table] = known[0] + row.rows, known[1] + row.rows * row.row_bytes
    return out


def _modules(workers: Sequence[GraphReading]) -> tuple[ModuleView, ...]:
    """Return the tree, means weighted by the sampled steps of each worker. Its order is that of the worker with most
    modules."""
    by_path: dict[str, list[tuple[int, ModuleReading]]] = {}
    for worker in sorted(workers, key=lambda w: -len(w.modules)):
        for module in worker.modules:
            by_path.setdefault(module.path, []).append((worker.steps, module))
    own = {path: (readings[0][1].parameters, readings[0][1].parameter_bytes) for path, readings in by_path.items()}
    total = dict.fromkeys(own, (0, 0))
    for path, (n, n_bytes) in own.items():
        for above in _with_parents(path):
            if above in total:
                total[above] = total[above][0] + n, total[above][1] + n_bytes
    out = []
    for path, readings in by_path.items():
        steps = sum(n for n, _ in readings)
        mean = [
            sum(n * getattr(m, name) for n, m in readings) / steps
            for name in ("calls", "forward_s", "own_s", "backward_s", "output_bytes")
        ]
        depth = sum(above in by_path for above in _with_parents(path)) - 1
        calls, forward_s, own_s, backward_s, output_bytes = mean
        kind = readings[0][1].kind
        out.append(
            ModuleView(path, kind, depth, calls, forward_s, own_s, backward_s, *total[path], output_bytes=output_bytes)
        )
    return tuple(out)


def _with_parents(path: str) -> list[str]:
    """Return ``["a", "a.b", "a.b.c"]`` for ``a.b.c``."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
