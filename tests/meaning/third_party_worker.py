"""The script of a job of several processes: one third-party model. ``third_party_worker.py MODEL OUT SEED TOO_LARGE``

``TOO_LARGE``: by how much the gradients of worker 1 are wrong (a planted mistake); 0: they are right."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import everstep as es
from everstep.errors import UserError
from meaning import third_party
from meaning.third_party import MODELS, Run

torch.set_num_threads(1)
name, out, seed, too_large = sys.argv[1:]
wrong = float(too_large) if os.environ.get("EVERSTEP_SLOT") == "1" else 0.0
third_party.RUN = Run(int(seed), Path(f"{out}.curve"), wrong)
missing = MODELS[name].missing()
if missing:
    raise SystemExit(missing)
try:
    result = MODELS[name].script(es)
except UserError as error:
    Path(f"{out}.refused").write_text(str(error))
    raise
if es.join().chief:
    Path(f"{out}.part").write_text(repr(float(result["metric"])))
    Path(f"{out}.part").rename(f"{out}.metric")
