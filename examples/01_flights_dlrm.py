"""Flight delays with a DLRM-style model.

python examples/01_flights_dlrm.py                                  # alone, in one process
everstep run --workers 2 --ps 1 examples/01_flights_dlrm.py         # the same script on a local cluster
"""

import torch
from torch import nn

import everstep as es
from flights import COLUMNS, DTYPES, N_DENSE, N_FIELDS, features, options, source
from scoring import logistic_auc, score


class DLRM(nn.Module):
    """Embeddings of the fields, their pairwise products and a bottom network's view of the dense values."""

    def __init__(self, fields: int, dense: int, dim: int = 16) -> None:
        super().__init__()
        self.fields = es.nn.Embedding("fields", dim, init=es.Normal(0.0, 0.05))  # no vocabulary: any int64 is a key
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, dim), nn.ReLU())
        n = fields + 1
        self.register_buffer("pairs", torch.triu_indices(n, n, 1), persistent=False)
        self.top = nn.Sequential(
            nn.Linear(n * dim + n * (n - 1) // 2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, batch):
        rows = torch.cat([self.fields(batch["cat"]), self.bottom(batch["dense"]).unsqueeze(1)], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([rows.flatten(1), products], dim=1)).squeeze(1)


args = options(__doc__)
loss_fn = nn.BCEWithLogitsLoss()

job = es.join()
model = job.sparse(DLRM(N_FIELDS, N_DENSE), optimizer=es.Adagrad(lr=0.1))
model = job.replicate(model)
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=2e-3))
loader = job.loader(
    source(args.rows),
    args.batch_size,
    epochs=args.epochs,
    split="90/10",
    columns=COLUMNS,
    dtypes=DTYPES,
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
    baseline = logistic_auc(loader, args.epochs)
    job.report(auc=auc, auc_logistic=baseline)
    job.log(f"test AUC {auc:.4f} (DLRM)   {baseline:.4f} (logistic regression)")
