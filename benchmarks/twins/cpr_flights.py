"""What a lossy partial rollback costs in quality: CPR (Maeng et al., MLSys 2021) on the flights, in plain PyTorch.

    python benchmarks/twins/cpr_flights.py --seeds 3 --losses 1,4 --saves 4

The network of ``twins/flights_ddp.py`` in one process; its table's rows belong to 6 shards by their key. ``--saves``
times an epoch everything is copied (a checkpoint); at each of ``--losses`` moments, half an interval after a copy, one
shard's rows and optimizer state go back to the copy and training goes on: nothing is trained again, the updates of
those rows since then are lost. The dense network is replicated at the workers and loses nothing. Fingerprints one JSON
line: test AUC without a loss, how much lower it is with each number of losses (medians over the seeds), and the share
of all row updates that was lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from flights_ddp import DLRM, ROWS, Batches

from everstep.data.loader import Loader
from flights import COLUMNS, N_DENSE, N_FIELDS, PATH, features
from scoring import score

SHARDS = 6


def train(loader: Loader, seed: int, losses: int, saves: int) -> tuple[float, float]:
    """Test AUC, and lost row updates over all."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = DLRM(N_FIELDS, N_DENSE)
    table = model.fields.weight
    adagrad = torch.optim.Adagrad([table], lr=0.1)
    adam = torch.optim.Adam([p for name, p in model.named_parameters() if "fields" not in name], lr=2e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    batches = Batches(loader)
    interval = max(2, len(batches) // saves)
    # Half an interval after a checkpoint: on average a loss comes there.
    moments = (
        {int(i) * interval + interval // 2 for i in np.linspace(0, saves - 1, losses).round()} if losses else set()
    )
    state = adagrad.state[table]["sum"]
    kept = table.detach().clone(), state.clone()
    since: list[torch.Tensor] = []
    lost = updates = 0
    for number in range(len(batches)):
        if number % interval == 0:
            kept = table.detach().clone(), state.clone()
            since.clear()
        if number in moments:
            shard = int(rng.integers(SHARDS))
            with torch.no_grad():
                mine = torch.arange(ROWS) % SHARDS == shard
                table[mine] = kept[0][mine]
                state[mine] = kept[1][mine]
            lost += sum(int((keys % SHARDS == shard).sum()) for keys in since)
        batch = batches[number]
        keys = torch.unique(batch["cat"] % ROWS)
        since.append(keys)
        updates += len(keys)
        loss = loss_fn(model(batch), batch["label"])
        adagrad.zero_grad()
        adam.zero_grad()
        loss.backward()
        adagrad.step()
        adam.step()
    return score(model, loader.eval_batches()), lost / updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", default="1,4")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loader = Loader(str(PATH), args.batch_size, split="90/10", columns=COLUMNS, transform=features)
    out: dict[str, float] = {}
    exact = [train(loader, seed, 0, args.saves)[0] for seed in range(args.seeds)]
    out["auc"] = statistics.median(exact)
    out["auc_spread"] = max(exact) - min(exact)
    for losses in map(int, args.losses.split(",")):
        found = [train(loader, seed, losses, args.saves) for seed in range(args.seeds)]
        out[f"auc_drop_{losses}"] = statistics.median(a - b for a, (b, _) in zip(exact, found, strict=True))
        out[f"updates_lost_{losses}"] = statistics.median(share for _, share in found)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
