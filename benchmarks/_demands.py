"""Says what a sample costs a job on emulated machines: one file that its processes read, and that may change."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

VARIABLE = "EVERSTEP_BENCH_DEMANDS"
LOOK_S = 0.2


class Costs(msgspec.Struct, frozen=True):
    """Says seconds: of a worker's device and of the source that all share for a sample, of a ps for a row."""

    own_s: float = 0.0
    shared_s: float = 0.0
    ps_row_s: float = 0.0

    def write(self, path: Path) -> None:
        """Replace the file, whole."""
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(path)


class Demands:
    """Reads the file that the environment names, at most so often."""

    def __init__(self) -> None:
        self._path = Path(os.environ[VARIABLE])
        self._looked_at = -LOOK_S
        self._costs = Costs()

    def __repr__(self) -> str:
        return f"<demands {self._costs} of {self._path}>"

    def now(self) -> Costs:
        """Return the costs."""
        at = time.monotonic()
        if at - self._looked_at >= LOOK_S:
            self._looked_at = at
            self._costs = msgspec.json.decode(self._path.read_bytes(), type=Costs)
        return self._costs
