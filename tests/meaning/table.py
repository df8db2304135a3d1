"""Rows and modes of the table, and how a row says what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Result = dict[str, np.ndarray[Any, Any]]
Script = Callable[[Any], Result]


@dataclass(frozen=True)
class Mode:
    """A column. ``join``: options of es.join() alone; ``flags``: of ``everstep run``, where real processes are."""

    name: str
    title: str
    means: str
    join: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    scale: int = 1  # batches of the loader in a step: plain PyTorch takes batches of so many times the samples
    passes: int = 1  # iterations of the script in a step
    ps: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    composed: bool = False  # which samples make up a step is known when it is over

    @property
    def alone(self) -> bool:
        return not self.flags

    @property
    def iterations(self) -> bool:
        """Whether an iteration of the script here is one of plain PyTorch."""
        return self.scale == self.passes == 1


_NOT_AHEAD = {"EVERSTEP_PREFETCH": "0"}  # rows of a batch pulled while the one before is computed are a step old
_ALLREDUCE = ("--mode", "allreduce")
MODES = {
    m.name: m
    for m in (
        Mode("alone", "alone", "`python train.py`", {"mode": "ps"}, ps=True),
        Mode(
            "async",
            "ps async",
            "`EVERSTEP_PREFETCH=0 everstep run --workers 1 --ps 2`",
            flags=("--workers", "1", "--ps", "2"),
            ps=True,
            environment=_NOT_AHEAD,
        ),
        Mode(
            "bounded",
            "ps bounded",
            "the same with `--consistency bounded:2`",
            flags=("--workers", "1", "--ps", "2", "--consistency", "bounded:2"),
            ps=True,
            environment=_NOT_AHEAD,
        ),
        Mode(
            "sync",
            "ps sync",
            "`--workers 2 --ps 2 --consistency sync`",
            flags=("--workers", "2", "--ps", "2", "--consistency", "sync"),
            scale=2,
            ps=True,
            composed=True,
        ),
        Mode("allreduce", "allreduce alone", '`es.join(mode="allreduce")`', {"mode": "allreduce"}),
        Mode(
            "elastic",
            "allreduce elastic",
            "`--mode allreduce --workers 2`",
            flags=(*_ALLREDUCE, "--workers", "2", "--min-workers", "2"),
            scale=2,
        ),
        Mode(
            "fixed",
            "allreduce fixed",
            "`--mode allreduce --workers 2 --strategy fixed`",
            flags=(*_ALLREDUCE, "--workers", "2", "--min-workers", "2", "--strategy", "fixed"),
            scale=2,
        ),
        Mode(
            "logical",
            "logical workers",
            '`es.join(mode="allreduce", logical_workers=2)`',
            {"mode": "allreduce", "logical_workers": 2},
            scale=2,
            passes=2,
        ),
        Mode(
            "logical-2",
            "logical, 2 workers",
            "`--mode allreduce --workers 2 --logical-workers 2`",
            flags=(*_ALLREDUCE, "--workers", "2", "--min-workers", "2", "--logical-workers", "2"),
            scale=2,
        ),
        Mode(
            "passes",
            "several passes",
            "allreduce alone, `largest_batch` of half a batch",
            {"mode": "allreduce"},
            passes=2,
        ),
        Mode("hybrid", "hybrid alone", '`es.join(mode="allreduce", ps=1)`', {"mode": "allreduce", "ps": 1}, ps=True),
        Mode(
            "hybrid-2",
            "hybrid, 2 workers",
            "`--mode allreduce --workers 2 --ps 2`",
            flags=(*_ALLREDUCE, "--workers", "2", "--min-workers", "2", "--ps", "2"),
            scale=2,
            ps=True,
        ),
        Mode(
            "shard",
            "processes per worker",
            "`--mode allreduce --workers 1 --processes-per-worker 2`",
            flags=(*_ALLREDUCE, "--workers", "1", "--processes-per-worker", "2"),
            scale=2,
        ),
    )
}
ALONE = [m for m in MODES.values() if m.alone]
REAL = [m for m in MODES.values() if not m.alone]


@dataclass(frozen=True)
class Row:
    name: str
    topic: str
    title: str
    script: Script
    stated: dict[str, str]  # modes -> one sentence
    reference: dict[str, Any]  # options of ``Plain``: what a cell that states a difference is held to instead
    rtol: float
    atol: float
    interrupt: str = ""  # jobs of real processes are stopped ("stop") or killed ("crash") in the middle, and resumed

    def __hash__(self) -> int:
        return hash(self.name)

    def says(self, mode: Mode) -> str | None:
        """The difference that is stated for ``mode``."""
        for key, sentence in self.stated.items():
            if mode.name in key.split():
                return sentence
        return None


ROWS: dict[str, Row] = {}
TOPICS: dict[str, str] = {}


def topic(title: str) -> str:
    TOPICS[title] = title
    return title


def row(
    about: str,
    title: str,
    *,
    stated: dict[str, str] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    interrupt: str = "",
    **reference: Any,
) -> Callable[[Script], Script]:
    """Make a function a row. ``stated``: sentences by modes, ``{"sync elastic": "..."}``."""

    def add(script: Script) -> Script:
        name = script.__name__
        if name in ROWS:
            raise ValueError(f"two rows are called {name!r}")
        ROWS[name] = Row(name, about, title, script, stated or {}, reference, rtol, atol, interrupt)
        return script

    return add


def load() -> dict[str, Row]:
    """All rows, in the order of the files' names."""
    for path in sorted((Path(__file__).parent / "rows").glob("[a-z]*.py")):
        import_module(f"meaning.rows.{path.stem}")
    return ROWS
