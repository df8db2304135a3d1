"""A small GPT that learns to write like Shakespeare, the whole model on every worker, which may be several processes.

python examples/05_gpt.py                                                                # alone, in one process
everstep run --mode allreduce --workers 2 examples/05_gpt.py                             # on a local cluster
everstep run --mode allreduce --workers 3 --logical-workers 4 examples/05_gpt.py         # same bits for any number
everstep run --mode allreduce --workers 2 --processes-per-worker 2 examples/05_gpt.py    # a model in 2 processes
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep as es
from shakespeare import bigram_loss, digest, letters, mean_loss, options, windows


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, kinds: int, length: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(kinds, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, kinds)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.letters(x) + self.places(places))))


args = options(__doc__)
text, alphabet = letters()
cut = len(text) * 9 // 10  # the last tenth is the test
train, test = windows(text[:cut], args.length)[: args.rows], windows(text[cut:], args.length)

job = es.join(mode="allreduce")
model = GPT(len(alphabet), args.length, args.width, args.layers, args.dropout)
if job.processes_per_worker > 1:  # processes of this worker: FSDP2 over them
    for part in (*model.blocks, model):
        fully_shard(part, mesh=job.device_mesh)
model = job.replicate(model)
opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))
for batch in job.steps(job.loader({"text": train}, args.batch_size, epochs=args.epochs)):
    logits = model(batch["text"][:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["text"][:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    job.report(loss=loss)

if args.digest:
    job.log("state", digest(model))
if job.chief:
    with job.eval(model):
        loss = mean_loss(model, test)
    baseline = bigram_loss(text[:cut], text[cut:], len(alphabet))
    job.report(test_loss=loss, test_loss_bigram=baseline)
    job.log(f"test loss {loss:.4f} (GPT)   {baseline:.4f} (last letter only), nats a letter")
