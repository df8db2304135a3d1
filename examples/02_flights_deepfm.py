"""Flight delays with DeepFM (arXiv:1703.04247): weights, pairwise products and a network over the same embeddings.

The tables are plain ``nn.Embedding`` and ``nn.EmbeddingBag``, as in a script that knows nothing of everstep; built on
the "meta" device they take no memory here: their rows appear on the ps when they are first used.
"""

import torch
from torch import nn

import everstep as es
from flights import COLUMNS, DTYPES, N_DENSE, N_FIELDS, features, options, source
from scoring import logistic_auc, score

ROWS = 1 << 20  # keys are hashed to this many rows; about 62,000 are ever used


class DeepFM(nn.Module):
    def __init__(self, fields: int, dense: int, dim: int = 16) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(ROWS, 1, mode="sum", device="meta")
        self.factors = nn.Embedding(ROWS, dim, device="meta")
        self.deep = nn.Sequential(
            nn.Linear(fields * dim + dense, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, batch):
        v = self.factors(batch["rows"])
        pairs = 0.5 * (v.sum(dim=1).square() - v.square().sum(dim=1)).sum(dim=1, keepdim=True)
        deep = self.deep(torch.cat([v.flatten(1), batch["dense"]], dim=1))
        return (self.weights(batch["rows"]) + pairs + deep).squeeze(1)


def hashed(batch):
    """Here, and not in the model, so that rows can be fetched while the batch before is computed."""
    batch = features(batch)
    return batch | {"rows": batch["cat"] % ROWS}


args = options(__doc__)
loss_fn = nn.BCEWithLogitsLoss()

job = es.join()
model = job.sparse(DeepFM(N_FIELDS, N_DENSE), optimizer=es.Adagrad(lr=0.05), init=es.Normal(0.0, 0.05))
model = job.replicate(model)
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=2e-3))
loader = job.loader(
    source(args.rows),
    args.batch_size,
    epochs=args.epochs,
    split="90/10",
    columns=COLUMNS,
    dtypes=DTYPES,
    transform=hashed,
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
    baseline = logistic_auc(loader, args.epochs)
    job.report(auc=auc, auc_logistic=baseline)
    job.log(f"test AUC {auc:.4f} (DeepFM)   {baseline:.4f} (logistic regression)")
