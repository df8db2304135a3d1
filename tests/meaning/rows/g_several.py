"""Several models, several optimizers, closures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meaning.kit import Net, Script
from meaning.rows.a_steps import OWN_GRADIENT
from meaning.table import Result, row, topic

SEVERAL = topic("Several models, optimizers, closures")


@row(SEVERAL, "two optimizers: one for the dense part, one that holds the tables")
def dense_and_tables(es: Any) -> Result:
    s = Script(es, table=None)
    dense = s.sgd(0.1, s.model.dense())
    tables = s.sgd(0.5, [s.model.emb.weight, s.model.bag.weight])
    for batch in s.batches():
        dense.zero_grad()
        tables.zero_grad()
        s.loss(batch).backward()
        dense.step()
        tables.step()
    return s.end()


@row(SEVERAL, "two optimizers for two layers, tables with the first one's parameters")
def two_layers(es: Any) -> Result:
    s = Script(es, table=None)
    last = list(s.model.last.parameters())
    body = [p for p in s.model.parameters() if not any(p is q for q in last)]
    one, two = s.sgd(0.1, body), s.of(torch.optim.Adam(last, lr=0.01))
    for batch in s.batches():
        one.zero_grad()
        two.zero_grad()
        s.loss(batch).backward()
        one.step()
        two.step()
    return s.end()


@row(SEVERAL, "two optimizers, neither holds the tables (es.SGD given)")
def nobody_holds_tables(es: Any) -> Result:
    s = Script(es)
    if s.job.spec.ps:
        one, two = s.sgd(0.1, s.model.first.parameters()), s.sgd(0.1, s.model.last.parameters())
    else:
        last = list(s.model.last.parameters())
        one = s.sgd(0.1, [p for p in s.model.parameters() if not any(p is q for q in last)])
        two = s.sgd(0.1, last)
    for batch in s.batches():
        one.zero_grad()
        two.zero_grad()
        s.loss(batch).backward()
        one.step()
        two.step()
    return s.end()


@row(SEVERAL, "two optimizers in turn (each steps in every other step)")
def in_turn(es: Any) -> Result:
    s = Script(es, table=None)
    last = list(s.model.last.parameters())
    body = [p for p in s.model.parameters() if not any(p is q for q in last)]
    both = s.sgd(0.1, body), s.sgd(0.05, last)
    for batch in s.batches():
        opt = both[s.job.step % 2]
        for each in both:
            each.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(SEVERAL, "the second optimizer stepped every 3rd step; its gradients are summed until then")
def rarer_second(es: Any) -> Result:
    s = Script(es, table=None)
    last = list(s.model.last.parameters())
    body = [p for p in s.model.parameters() if not any(p is q for q in last)]
    one, two = s.sgd(0.1, body), s.sgd(0.03, last)
    for batch in s.batches():
        one.zero_grad()
        s.loss(batch).backward()
        one.step()
        if s.job.step % 3 == 2:
            two.step()
            two.zero_grad()
    return s.end()


@row(SEVERAL, "two models, one loss, one optimizer over both")
def two_models(es: Any) -> Result:
    s = Script(es, table=None)
    head = s.put(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    opt = s.sgd(0.05, [*s.model.parameters(), *head.parameters()])
    for batch in s.batches():
        opt.zero_grad()
        nn.functional.mse_loss(head(s.model(batch)), batch["y"]).backward()
        opt.step()
    return s.end()


@row(SEVERAL, "two models, each with an optimizer and a loss of its own, both in one `backward`")
def two_losses(es: Any) -> Result:
    s = Script(es, table=None)
    other = s.put(Net(), table=None)
    one, two = s.sgd(0.1, s.model.parameters()), s.sgd(0.03, other.parameters())
    for batch in s.batches():
        one.zero_grad()
        two.zero_grad()
        (s.loss(batch) + s.loss(batch, other)).backward()
        one.step()
        two.step()
    return s.end()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 4)
        self.out = nn.Linear(8, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        noise = torch.sin(batch["row"][:, None] * torch.arange(1.0, 5.0))
        out: torch.Tensor = self.out(torch.cat([self.emb(batch["ids"][:, 0]), noise], 1))
        return out


def gan(es: Any, under: bool) -> Result:
    s = Script(es, Generator, table=None)
    judge = s.put(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    opt_g, opt_d = s.sgd(0.05), s.sgd(0.05, judge.parameters())
    bce = nn.functional.binary_cross_entropy_with_logits
    for batch in s.batches():
        n = len(batch["y"])
        opt_d.zero_grad()
        if under:
            with s.job.no_sync():
                bce(judge(batch["x"]), torch.ones(n, 1)).backward()
            fake = s.model(batch)
            with s.job.no_sync():
                bce(judge(fake.detach()), torch.zeros(n, 1)).backward()
        else:
            bce(judge(batch["x"]), torch.ones(n, 1)).backward()
            fake = s.model(batch)
            bce(judge(fake.detach()), torch.zeros(n, 1)).backward()
        opt_d.step()
        opt_g.zero_grad()
        bce(judge(fake), torch.ones(n, 1)).backward()
        opt_g.step()
    return s.end()


@row(SEVERAL, "a GAN in the order of PyTorch's DCGAN example")
def dcgan(es: Any) -> Result:
    return gan(es, False)


@row(SEVERAL, "the same with all but the last `backward` under `job.no_sync()`")
def dcgan_no_sync(es: Any) -> Result:
    return gan(es, True)


@row(SEVERAL, "a GAN: discriminator in even steps, generator in odd ones")
def gan_in_turn(es: Any) -> Result:
    s = Script(es, Generator, table=None)
    judge = s.put(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    opt_g, opt_d = s.sgd(0.05), s.sgd(0.05, judge.parameters())
    bce = nn.functional.binary_cross_entropy_with_logits
    for batch in s.batches():
        n = len(batch["y"])
        opt_d.zero_grad()
        opt_g.zero_grad()
        if s.job.step % 2 == 0:
            real = bce(judge(batch["x"]), torch.ones(n, 1))
            (real + bce(judge(s.model(batch).detach()), torch.zeros(n, 1))).backward()
            opt_d.step()
        else:
            bce(judge(s.model(batch)), torch.ones(n, 1)).backward()
            opt_g.step()
    return s.end()


@row(SEVERAL, "SAM: ascend, `backward` anew, go back, `step`", stated=OWN_GRADIENT)
def sam(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        kept = [p.detach().clone() for p in s.model.dense()]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in s.model.dense()]).norm()
            for p in s.model.dense():
                p.add_(p.grad * 0.05 / norm)
        opt.zero_grad()
        s.loss(batch).backward()
        with torch.no_grad():
            for p, was in zip(s.model.dense(), kept, strict=True):
                p.copy_(was)
        opt.step()
    return s.end()


@row(SEVERAL, "SGD with a closure: `opt.step(closure)`")
def closure(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():

        def again(batch: Any = batch) -> Any:
            opt.zero_grad()
            loss = s.loss(batch)
            loss.backward()
            return loss

        s.each("step", opt.step(again).detach())
    return s.end()


@row(SEVERAL, "LBFGS with a closure")
def lbfgs(es: Any) -> Result:
    s = Script(es, epochs=1)
    opt = s.of(torch.optim.LBFGS(s.model.dense(), lr=0.05, max_iter=3))
    for batch in s.batches():

        def again(batch: Any = batch) -> Any:
            opt.zero_grad()
            loss = s.loss(batch)
            loss.backward()
            return loss

        opt.step(again)
    return s.end()


@row(SEVERAL, "one model on two inputs (siamese)")
def siamese(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        flipped = {**batch, "ids": batch["ids"].flip(1)}
        (s.model(batch) - s.model(flipped) - batch["y"]).square().mean().backward()
        opt.step()
    return s.end()


@row(SEVERAL, "several losses, weighted by learned weights (uncertainty weighting)")
def learned_weights(es: Any) -> Result:
    class Weighted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log_var = nn.Parameter(torch.zeros(2))

    s = Script(es, Weighted)
    opt = s.sgd(0.05)
    for batch in s.batches():
        opt.zero_grad()
        out = s.model(batch)
        losses = torch.stack([(out - batch["y"]).square().mean(), (out - batch["y"]).abs().mean()])
        (torch.exp(-s.model.log_var) * losses + s.model.log_var).sum().backward()
        opt.step()
    return s.end()


@row(SEVERAL, "a loss with parameters of its own (a second module)")
def loss_with_parameters(es: Any) -> Result:
    s = Script(es)
    scale = s.put(nn.Linear(1, 1))
    opt = s.sgd(0.05, [*s.model.dense(), *scale.parameters()])
    for batch in s.batches():
        opt.zero_grad()
        (scale(s.model(batch)) - batch["y"]).square().mean().backward()
        opt.step()
    return s.end()


@row(SEVERAL, "distillation: a second model, not trained, gives targets")
def distillation(es: Any) -> Result:
    s = Script(es)
    torch.manual_seed(5)
    guide = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
    opt = s.sgd()
    for batch in s.batches():
        with torch.no_grad():
            target = guide(batch["x"])
        opt.zero_grad()
        nn.functional.mse_loss(s.model(batch), target).backward()
        opt.step()
    return s.end()
