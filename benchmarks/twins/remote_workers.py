"""The throughput model on the workers of other nodes only: the worker on node0 takes no batch.

``everstep run`` always has a worker on its own node, which reaches the ps through shared memory; this keeps it idle
until two others have written their lines to ``--out``, so that all rows of the measurement cross TCP.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WAIT_S = 300.0

if os.environ.get("EVERSTEP_NODE") == "node0":
    at = sys.argv.index("--out")
    out = Path(sys.argv[at + 1])
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and (not out.exists() or len(out.read_text().splitlines()) < 2):
        time.sleep(0.2)
    del sys.argv[at : at + 2]
    sys.argv[sys.argv.index("--batches") + 1] = "1"  # a script that trains nothing at all would fail the job

from throughput_model import main  # noqa: E402

main()
