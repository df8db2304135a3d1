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
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import everstep as es
from flights import COLUMNS, FIELDS, PATH, features, source

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
    table = pq.read_table(PATH, columns=[*FIELDS, "arr_delay"]).slice(0, args.rows)
    plain = torch.stack([torch.from_numpy(table[name].to_numpy().astype(np.int64)) for name in FIELDS], dim=1)
    delay = torch.from_numpy(table["arr_delay"].to_numpy().astype(np.float32))
    keys = torch.unique(features({"plain": plain, "delay": delay})["cat"])
    with job.eval(model):
        got = np.concatenate([model(part).detach().numpy() for part in keys.split(8192)])
    digest = hashlib.blake2b(got.tobytes(), digest_size=16).hexdigest()
    args.out.write_text(json.dumps({"rows": len(keys), "digest": digest, "sum": float(got.sum(dtype=np.float64))}))
