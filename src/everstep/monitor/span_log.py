"""Keeps what the stages of a worker did in iterations: a file of JSON lines for each stage, in RUN_DIR/spans."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import ConfigError
from everstep.model.stage_spans import StageIteration
from everstep.monitor.rotated import RotatedFile

FOLDER: Final = "spans"
_MAX_BYTES: Final = 8 << 20
_LINE_MAX_BYTES: Final = 4 << 20
_encoder = msgspec.json.Encoder(decimal_format="number")
_decoder = msgspec.json.Decoder(StageIteration)


class SpanLog:
    """Writes the iterations of one stage. A full disk costs lines, never the job."""

    def __init__(self, run_dir: Path, worker: int, stage: int) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        self._file = RotatedFile(folder / f"worker-{worker}.stage-{stage}.jsonl", _MAX_BYTES)

    def write(self, iteration: StageIteration) -> None:
        self._file.write([_encoder.encode(iteration)])

    def close(self) -> None:
        self._file.close()


def read_spans(run_dir: Path) -> list[StageIteration]:
    """Return all iterations that a run has kept. Raises ConfigError, one line: there are none. Lines that are cut off
    by the end of a process are left out."""
    found: list[StageIteration] = []
    folder = run_dir / FOLDER
    for path in sorted(folder.glob("worker-*.stage-*.jsonl*")):
        for line in path.read_bytes().split(b"\n"):
            if not 0 < len(line) <= _LINE_MAX_BYTES:
                continue
            try:
                found.append(_decoder.decode(line))
            except MALFORMED:
                continue
    if not found:
        raise ConfigError(
            f"{run_dir} has no measured iterations of stages: they are of jobs with --mode pipeline and --stages 2 or "
            "more, on this machine"
        )
    return found
