"""A small GPT that learns to write like Shakespeare, cut into stages, one process each.

python examples/06_gpt_pipeline.py                                                       # alone: all in one process
everstep run --mode pipeline --stages 2 examples/06_gpt_pipeline.py                      # the same numbers, two stages
everstep run --mode pipeline --stages 2 --workers 2 examples/06_gpt_pipeline.py          # two replicas of two stages
"""

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import everstep as es
from shakespeare import bigram_loss, letters, mean_loss, options, windows


class Embeddings(nn.Module):
    def __init__(self, kinds: int, length: int, width: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(kinds, width), nn.Embedding(length, width)

    def forward(self, x):
        return self.letters(x) + self.places(torch.arange(x.shape[1]))


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


def next_letter_loss(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


args = options(__doc__)
text, alphabet = letters()
cut = len(text) * 9 // 10  # the last tenth is the test
train, test = windows(text[:cut], args.length)[: args.rows], windows(text[cut:], args.length)

job = es.join(mode="pipeline")
layers = [Block(args.width, 4, args.dropout) for _ in range(args.layers)]
net = nn.Sequential(
    Embeddings(len(alphabet), args.length, args.width),
    *layers,
    nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, len(alphabet))),
)
model = job.pipeline(net, schedule=Schedule1F1B, microbatches=8, loss_fn=next_letter_loss)
opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))
for batch in job.steps(job.loader({"text": train}, args.batch_size, epochs=args.epochs)):
    opt.zero_grad()
    loss = model.step(batch["text"][:, :-1], target=batch["text"][:, 1:])
    job.clip_grad_norm_(1.0)
    opt.step()
    job.report(loss=loss)

if args.digest:
    job.log("state", job.digest())
if job.chief:  # in all processes of that worker: they evaluate together
    with job.eval():
        loss = mean_loss(model, test)
    baseline = bigram_loss(text[:cut], text[cut:], len(alphabet))
    job.report(test_loss=loss, test_loss_bigram=baseline)
    job.log(f"test loss {loss:.4f} (GPT)   {baseline:.4f} (last letter only), nats a letter")
