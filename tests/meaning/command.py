"""The command of the table: which cells, computed side by side, and what is written."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from meaning.cells import Cell, compute
from meaning.page import PAGE, page
from meaning.table import MODES, Mode, Row, load

RESULTS = Path(__file__).with_name("results.json")


def recorded() -> dict[str, dict[str, Cell]]:
    """Row -> mode -> cell, as they are in ``results.json``."""
    if not RESULTS.exists():
        return {}
    found = json.loads(RESULTS.read_text())
    return {row: {mode: Cell(*cell) for mode, cell in cells.items()} for row, cells in found.items()}


def record(cells: dict[str, dict[str, Cell]]) -> None:
    rows = load()
    ordered = {
        name: {m: _plainly(cells[name][m]) for m in MODES if m in cells[name]} for name in rows if cells.get(name)
    }
    lines = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(mode)}: {json.dumps(cell, ensure_ascii=False)}" for mode, cell in found.items())
        + "\n }"
        for name, found in ordered.items()
    ]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _plainly(cell: Cell) -> list[str]:
    return [cell.verdict, cell.detail] if cell.detail else [cell.verdict]


@contextmanager
def one_import() -> Iterator[None]:
    """The jobs' processes are forks of one that has imported torch, as those of the tests are (``conftest.py``)."""
    server = Path(__file__).parents[1] / "forkserver"
    with tempfile.TemporaryDirectory(prefix="meaning-server-") as folder:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.environ["EVERSTEP_TEST_FORKSERVER"] = f"{folder}/sock"
        listener.bind(f"{folder}/sock")
        listener.listen(64)
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        process = subprocess.Popen(
            [sys.executable, str(server / "forkserver.py"), str(listener.fileno())],
            stdin=subprocess.PIPE,
            env={**os.environ, **single, "EVERSTEP_RUN_DIR": "-" * 1000},
            cwd=folder,
            pass_fds=[listener.fileno()],
        )
        listener.close()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(server), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            yield
        finally:
            process.kill()
            process.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/meaning", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="all modes (default: those without real processes)")
    parser.add_argument("--rows", default="", help="names, or parts of names, of rows, by commas (default: all)")
    parser.add_argument("--modes", default="", help="names of modes, by commas")
    parser.add_argument("--jobs", type=int, default=2, help="jobs of real processes at a time")
    parser.add_argument("--dry", action="store_true", help="show, record nothing")
    parser.add_argument("--missing", action="store_true", help="only cells of which nothing is recorded")
    parser.add_argument("--not-same", action="store_true", help="only cells that are recorded as something else")
    parser.add_argument("--page", action="store_true", help="only write the page from what is recorded")
    given = parser.parse_args()
    rows, cells = load(), recorded()
    if given.page:
        PAGE.write_text(page(rows, cells))
        return
    parts = [p for p in given.rows.split(",") if p]
    chosen = [r for r in rows.values() if not parts or any(p in r.name for p in parts)]
    names = [m for m in given.modes.split(",") if m] or [m.name for m in MODES.values() if given.whole or m.alone]

    def wanted_of(row: Row, name: str) -> bool:
        known = cells.get(row.name, {}).get(name)
        return not (given.missing and known) and not (given.not_same and known and known.verdict == "same")

    begin, counts = time.monotonic(), Counter[tuple[str, str]]()

    def keep(row: Row, mode: Mode, cell: Cell) -> None:
        before = cells.setdefault(row.name, {}).get(mode.name)
        cells[row.name][mode.name] = cell
        counts[mode.name, cell.verdict] += 1
        if cell.verdict != "same" or before not in (None, cell):
            was = "" if before in (None, cell) else f"   (was {before.verdict})"
            print(f"{row.name:28} {mode.name:10} {cell.verdict}: {cell.detail}{was}", flush=True)
        if not given.dry:
            record(cells)

    for row in chosen:
        for name in names:
            if MODES[name].alone and wanted_of(row, name):
                keep(row, MODES[name], compute(row, MODES[name]))
    with one_import(), ThreadPoolExecutor(given.jobs) as pool:
        wanted = [
            (row, MODES[name]) for name in names if not MODES[name].alone for row in chosen if wanted_of(row, name)
        ]
        futures = {pool.submit(compute, row, mode): (row, mode) for row, mode in wanted}
        for future in as_completed(futures):
            keep(*futures[future], future.result())
    for mode in MODES:
        found = {verdict: n for (m, verdict), n in counts.items() if m == mode}
        if found:
            print(f"{mode:10} {found}")
    print(f"{sum(counts.values())} cells in {time.monotonic() - begin:.0f} s")
    if not given.dry:
        record(cells)
        PAGE.write_text(page(rows, cells))
