"""Clicks in a fashion shop (Open Bandit, 60,000 impressions, 0.5 % clicks) with a wide and deep model.

So few clicks teach little: expect a test AUC somewhat above chance, moving by some hundredths with the seed. The
example is about the shape of the problem: rare labels, text columns, a text column of times, an FTRL table.
"""

import argparse
from pathlib import Path

import pyarrow.parquet as pq
import torch
from scoring import logistic_auc, score
from torch import nn

import everstep as es
from everstep.data.keys import cross, field_keys

PATH = Path(__file__).parent / "data" / "open_bandit.parquet"
USER = [f"user_feature_{i}" for i in range(4)]
COLUMNS = {"plain": ["campaign", "item_id", "position", *USER], "dense": ["affinity"], "label": "click"}
N_FIELDS = 11


def features(batch):
    plain = batch["plain"]
    campaign, item, position, *user = plain.unbind(1)
    shown = cross(campaign, item)  # item ids begin again in every campaign
    crosses = [shown, cross(campaign, position), cross(shown, user[0]), cross(shown, user[2])]
    return {
        "cat": field_keys(torch.cat([plain, torch.stack(crosses, dim=1)], dim=1)),
        "dense": torch.log1p(batch["dense"]),
        "label": batch["label"],
    }


class WideAndDeep(nn.Module):
    """A sparse linear part that FTRL keeps small, beside a small network over embeddings."""

    def __init__(self, fields: int, dense: int, dim: int = 8) -> None:
        super().__init__()
        self.wide = es.nn.EmbeddingBag("wide", 1, mode="sum", init=es.Constant(0.0), optimizer=es.FTRL(0.05, l1=0.5))
        self.rows = es.nn.Embedding("deep", dim, init=es.Normal(0.0, 0.05), optimizer=es.RowWiseAdagrad(lr=0.02))
        self.deep = nn.Sequential(nn.Linear(fields * dim + dense, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.constant_(self.deep[2].bias, -5.3)  # log odds of a click

    def forward(self, batch):
        deep = self.deep(torch.cat([self.rows(batch["cat"]).flatten(1), batch["dense"]], dim=1))
        return (self.wide(batch["cat"]) + deep).squeeze(1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--rows", type=int, help="use the first ROWS rows only")
parser.add_argument("--batch-size", type=int, default=512)
args = parser.parse_args()
loss_fn = nn.BCEWithLogitsLoss()

job = es.join()
model = job.sparse(WideAndDeep(N_FIELDS, 1))
model = job.replicate(model)
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
loader = job.loader(
    str(PATH) if args.rows is None else pq.read_table(PATH).slice(0, args.rows),
    args.batch_size,
    epochs=args.epochs,
    split="70/30",
    columns=COLUMNS,
    dtypes={"dense": "float32", "label": "float32"},
    transform=features,
)
for batch in job.steps(loader):
    loss = loss_fn(model(batch), batch["label"])
    opt.zero_grad()
    loss.backward()
    opt.step()
    job.report(loss=loss)

if job.chief:
    with job.eval(model):
        auc = score(model, loader.eval_batches())
    baseline = logistic_auc(loader, args.epochs, lr=0.003)
    job.report(auc=auc, auc_logistic=baseline)
    job.log(f"test AUC {auc:.4f} (wide and deep)   {baseline:.4f} (logistic regression)")
