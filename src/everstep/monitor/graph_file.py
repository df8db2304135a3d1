"""Has ``graph.json``: the newest readings of the model and the tables, also after the end of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from everstep.model.graph_readings import GraphView
from everstep.model.job_view import BindingView
from everstep.model.partition_load import PartitionView
from everstep.storage.atomic import write_atomic

GRAPH_FILE: Final = "graph.json"


class GraphRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Is ``graph.json``. ``at``: when it was written (seconds since 1970)."""

    at: float
    graph: GraphView
    binding: BindingView | None = None
    hottest: tuple[PartitionView, ...] = ()


def write_graph(run_dir: Path, record: GraphRecord) -> None:
    """Write the record. Raises PlatformError."""
    write_atomic(run_dir / GRAPH_FILE, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
