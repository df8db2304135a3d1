"""Whole-number gradients from the flights data: what the rows hold at the end has one right answer, to the bit.

Every sample adds whole numbers, made of its label and delay, to the rows of its keys (SGD, lr 1). Sums of whole numbers
below 2**24 are exact in float32 in any order, so a run in which ps are killed must end with the very bytes of one in
which nobody was. The chief writes the digest of all rows, in order of their keys, to ``--out``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import everstep as es
from everstep.data.source import open_source
from flights import COLUMNS, features, source

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--rows", type=int, default=None)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

DIM = 4
job = es.join()
model = job.sparse(es.nn.Embedding("fields", DIM, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
loader = job.loader(source(args.rows), args.batch_size, epochs=args.epochs, columns=COLUMNS, transform=features)
for batch in job.steps(loader):
    rows = model(batch["cat"])
    weight = torch.stack([batch["label"] + 1, batch["label"] * 3 - 1, torch.ones_like(batch["label"]), -batch["label"]])
    (-(rows * weight.T.unsqueeze(1))).sum().backward()

if job.chief:
    data = open_source(source(args.rows), COLUMNS)
    parts = [data.read(np.arange(lo, min(lo + 20_000, len(data)))) for lo in range(0, len(data), 20_000)]
    batches = [{name: torch.from_numpy(np.asarray(column)) for name, column in part.items()} for part in parts]
    keys = torch.unique(torch.cat([features(batch)["cat"].flatten() for batch in batches]))
    with job.eval(model):
        got = np.concatenate([model(part).detach().numpy() for part in keys.split(8192)])
    digest = hashlib.blake2b(got.tobytes(), digest_size=16).hexdigest()
    args.out.write_text(json.dumps({"rows": len(keys), "digest": digest, "sum": float(got.sum(dtype=np.float64))}))
