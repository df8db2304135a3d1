"""The script of a job of real processes: one row. ``worker.py ROW MODE OUT``"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from everstep.agent.worker_process import with_advice
from everstep.errors import UserError
from meaning import interrupted
from meaning.cells import Everstep
from meaning.composed import begin_together, note_parts
from meaning.table import MODES, load

torch.set_num_threads(1)
name, mode, out = sys.argv[1:]
es = Everstep(MODES[mode])
if MODES[mode].composed:
    note_parts(f"{out}.parts-{int(interrupted.SECOND.exists())}-{os.getpid()}")
    begin_together(Path(out).parent, int(os.environ["EVERSTEP_SLOT"]), MODES[mode].scale)
try:
    result = load()[name].script(es)
except UserError as error:
    Path(out).with_suffix(".refused").write_text(str(error))
    raise
except RuntimeError as error:  # of torch, about a sharded model: what everstep says with it
    line = f"{type(error).__name__}: {error}"
    advised = with_advice(line, getattr(es.join(), "processes_per_worker", 1) > 1)
    if advised != line:
        Path(out).with_suffix(".refused").write_text(" ".join(advised.split()))
    raise
job = es.join()
if job.chief and getattr(job, "process_index", 0) == 0:
    with Path(f"{out}.part").open("wb") as file:
        np.savez(file, **result)
    Path(f"{out}.part").rename(out)
