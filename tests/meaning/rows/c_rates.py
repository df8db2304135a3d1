"""Optimizers, parameter groups, schedules of learning rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as sched

from meaning.kit import DIM, Net, Script
from meaning.table import Result, row, topic

RATES = topic("Optimizers and learning rates")
LAZY = {
    "alone async bounded sync hybrid hybrid-2": "A table's row is moved by the steps whose batches look it up, as with "
    "`torch.optim.SparseAdam`, if it has more than 65,536 numbers: PyTorch's dense optimizer also moves rows that no "
    "batch of the step has. Adam counts the steps of each row."
}


def train(s: Script, opt: Any, after: Any = lambda: None) -> Result:
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        after()
    return s.end()


@row(RATES, "one SGD for dense part and tables, `job.sparse` without an optimizer")
def one_sgd(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.sgd())


@row(RATES, "one Adagrad for dense part and tables")
def one_adagrad(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.of(torch.optim.Adagrad(s.model.parameters(), lr=0.1)))


@row(RATES, "one Adam for dense part and tables")
def one_adam(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.of(torch.optim.Adam(s.model.parameters(), lr=0.01)))


@row(RATES, "the same with tables of more than 65,536 numbers", stated=LAZY, lazy=True)
def one_adam_large(es: Any) -> Result:
    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20_000, DIM)
            self.bag = nn.EmbeddingBag(20_000, DIM, mode="sum")

    s = Script(es, Large, table=None)
    return train(s, s.of(torch.optim.Adam(s.model.parameters(), lr=0.01)))


@row(RATES, "one AdamW for dense part and tables")
def one_adamw(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.of(torch.optim.AdamW(s.model.parameters(), lr=0.01, weight_decay=0.1)))


@row(RATES, "one SGD with momentum for dense part and tables")
def one_momentum(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.sgd(0.03, momentum=0.9))


@row(RATES, "one SGD with weight decay for dense part and tables")
def one_decay(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.sgd(weight_decay=0.1))


@row(RATES, "Adam for the dense part, es.Adagrad for tables")
def adam_and_adagrad(es: Any) -> Result:
    s = Script(es, table=es.Adagrad(lr=0.1))
    if not s.job.spec.ps:
        return train(s, s.of(torch.optim.Adam(s.model.parameters(), lr=0.01)))
    return train(s, s.of(torch.optim.Adam(s.model.dense(), lr=0.01)))


@row(RATES, "`job.optimizer` of the dense parameters alone, es.SGD for tables")
def dense_alone(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(params=s.model.dense() if s.job.spec.ps else None))


@row(RATES, "AdamW with decoupled weight decay for the dense part")
def adamw(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.AdamW(s.model.dense(), lr=0.01, weight_decay=0.1)))


@row(RATES, "SGD with Nesterov momentum for the dense part")
def nesterov(es: Any) -> Result:
    s = Script(es)
    return train(s, s.sgd(0.03, s.model.dense(), momentum=0.9, nesterov=True))


@row(RATES, "Adagrad with `lr_decay` and an initial accumulator")
def adagrad_decay(es: Any) -> Result:
    s = Script(es)
    opt = torch.optim.Adagrad(s.model.dense(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1)
    return train(s, s.of(opt))


@row(RATES, "RMSprop")
def rmsprop(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.RMSprop(s.model.dense(), lr=0.003)))


@row(RATES, "Adam with `amsgrad`")
def amsgrad(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.Adam(s.model.dense(), lr=0.01, amsgrad=True)))


@row(RATES, "SGD with `maximize=True`")
def maximize(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.1, s.model.dense(), maximize=True)
    for batch in s.batches():
        opt.zero_grad()
        (-s.loss(batch)).backward()
        opt.step()
    return s.end()


@row(RATES, "Adam, AdamW, Adagrad and RMSprop with `maximize=True`, a layer or two each")
def maximize_others(es: Any) -> Result:
    s = Script(es)
    net, up = s.model, {"maximize": True}
    adam = s.of(torch.optim.Adam([net.first.weight], 0.01, **up))
    adamw = s.of(torch.optim.AdamW([net.first.bias], 0.01, weight_decay=0.1, **up))
    adagrad = s.of(torch.optim.Adagrad([net.last.weight], 0.05, **up))
    rmsprop = s.of(torch.optim.RMSprop([net.last.bias], 0.003, **up))
    table = s.of(torch.optim.SGD([net.emb.weight, net.bag.weight], 0.1))
    for batch in s.batches():
        loss = s.loss(batch)
        for opt in (adam, adamw, adagrad, rmsprop, table):
            opt.zero_grad()
        (-loss).backward()
        for p in (net.emb.weight, net.bag.weight):
            if p.grad is not None:
                p.grad.neg_()
        for opt in (adam, adamw, adagrad, rmsprop, table):
            opt.step()
    return s.end()


@row(RATES, "one SGD with `maximize=True` for dense part and tables")
def maximize_tables(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd(maximize=True)
    for batch in s.batches():
        opt.zero_grad()
        (-s.loss(batch)).backward()
        opt.step()
    return s.end()


@row(RATES, "RMSprop, centered, with momentum and weight decay")
def rmsprop_full(es: Any) -> Result:
    s = Script(es)
    opt = torch.optim.RMSprop(s.model.dense(), lr=0.001, momentum=0.5, centered=True, weight_decay=0.01, alpha=0.9)
    return train(s, s.of(opt))


@row(RATES, "AdamW with `amsgrad`")
def amsgrad_adamw(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.AdamW(s.model.dense(), lr=0.01, amsgrad=True)))


@row(RATES, "Adadelta")
def adadelta(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.Adadelta(s.model.dense(), lr=1.0)))


@row(RATES, "Adamax")
def adamax(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.Adamax(s.model.dense(), lr=0.01)))


@row(RATES, "NAdam")
def nadam(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.NAdam(s.model.dense(), lr=0.01)))


@row(RATES, "RAdam")
def radam(es: Any) -> Result:
    s = Script(es)
    return train(s, s.of(torch.optim.RAdam(s.model.dense(), lr=0.01)))


@row(RATES, "one RMSprop for dense part and tables")
def one_rmsprop(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.of(torch.optim.RMSprop(s.model.parameters(), lr=0.003)))


@row(RATES, "an optimizer class of the script's own")
def own_optimizer(es: Any) -> Result:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad.sign(), alpha=-group["lr"])

    s = Script(es)
    return train(s, s.of(Signs(s.model.dense(), 0.003)))


@row(RATES, "two parameter groups with rates of their own")
def two_groups(es: Any) -> Result:
    s = Script(es)
    head = list(s.model.last.parameters())
    body = [p for p in s.model.parameters() if not any(p is h for h in head)]
    return train(s, s.of(torch.optim.SGD([{"params": body}, {"params": head, "lr": 0.02}], lr=0.1)))


@row(RATES, "weight decay for weights, none for biases")
def decay_groups(es: Any) -> Result:
    s = Script(es)
    weights = [p for p in s.model.dense() if p.dim() > 1]
    biases = [p for p in s.model.dense() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return train(s, s.of(torch.optim.SGD(groups, lr=0.1)))


@row(RATES, "a group of tables with a rate of its own, in one torch optimizer")
def table_group(es: Any) -> Result:
    s = Script(es, table=None)
    tables = [s.model.emb.weight, s.model.bag.weight]
    return train(s, s.of(torch.optim.SGD([{"params": s.model.dense()}, {"params": tables, "lr": 0.5}], lr=0.1)))


@row(RATES, "a schedule per step (StepLR), for tables too")
def step_lr(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd()
    schedule = sched.StepLR(opt, 5, 0.5)
    s.job.track(schedule=schedule)
    return train(s, opt, schedule.step)


@row(RATES, "the same with es.SGD given to `job.sparse`")
def step_lr_given(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    schedule = sched.StepLR(opt, 5, 0.5)
    s.job.track(schedule=schedule)
    return train(s, opt, schedule.step)


@row(RATES, "a schedule made of the torch optimizer before `job.optimizer`")
def schedule_first(es: Any) -> Result:
    s = Script(es)
    inner = torch.optim.SGD(s.model.parameters(), lr=0.1)
    schedule = sched.ExponentialLR(inner, 0.9)
    s.job.track(schedule=schedule)
    return train(s, s.of(inner), schedule.step)


@row(RATES, "a schedule per epoch, one `job.steps` each")
def epoch_lr(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd()
    schedule = sched.ExponentialLR(opt, 0.5)
    s.job.track(schedule=schedule)
    for _ in range(3):
        for batch in s.batches(epochs=1):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
        schedule.step()
    s.note("lr", opt.param_groups[0]["lr"])
    return s.end()


@row(RATES, "ReduceLROnPlateau of a validation loss")
def plateau(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd(0.2)
    schedule = sched.ReduceLROnPlateau(opt, factor=0.1, patience=0, threshold=0.5)
    s.job.track(schedule=schedule)
    whole = {k: torch.as_tensor(v) for k, v in s.data.items()}
    for _ in range(4):
        for batch in s.batches(epochs=1):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
        with s.job.eval(s.model):
            loss = torch.nn.functional.mse_loss(s.model(whole), whole["y"])
        schedule.step(loss)
    s.note("lr", opt.param_groups[0]["lr"])
    return s.end()


@row(RATES, "OneCycleLR, which cycles the momentum too")
def one_cycle(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.01, s.model.dense(), momentum=0.9)
    schedule = sched.OneCycleLR(opt, max_lr=0.05, total_steps=40)
    s.job.track(schedule=schedule)
    return train(s, opt, schedule.step)


@row(RATES, "OneCycleLR of one SGD for dense part and tables")
def one_cycle_tables(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd(0.01, momentum=0.9)
    schedule = sched.OneCycleLR(opt, max_lr=0.05, total_steps=40)
    s.job.track(schedule=schedule)
    return train(s, opt, schedule.step)


@row(RATES, "OneCycleLR with Adam, whose first beta it cycles")
def one_cycle_adam(es: Any) -> Result:
    s = Script(es)
    opt = s.of(torch.optim.Adam(s.model.dense(), lr=0.001))
    schedule = sched.OneCycleLR(opt, max_lr=0.01, total_steps=40)
    s.job.track(schedule=schedule)
    return train(s, opt, schedule.step)


@row(RATES, "weight decay of one SGD for dense part and tables, from the middle on")
def decay_later(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd()
    for batch in s.batches():
        opt.param_groups[0]["weight_decay"] = 0.1 if s.job.step >= 6 else 0.0
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(RATES, "one Adagrad with `lr_decay` for dense part and tables")
def one_adagrad_decay(es: Any) -> Result:
    s = Script(es, table=None)
    return train(s, s.of(torch.optim.Adagrad(s.model.parameters(), lr=0.1, lr_decay=0.1)))


@row(RATES, "weight decay and momentum of a group set by hand in the middle")
def options_by_hand(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd(0.02, s.model.dense(), momentum=0.5)
    for batch in s.batches():
        if s.job.step >= 6:  # (a worker that was late may see no iteration 6)
            opt.param_groups[0].update(weight_decay=0.1, momentum=0.8)
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(RATES, "linear warm-up, then cosine (SequentialLR)")
def warm_up(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    warm, cosine = sched.LinearLR(opt, 0.1, total_iters=5), sched.CosineAnnealingLR(opt, 20)
    schedule = sched.SequentialLR(opt, [warm, cosine], [5])
    s.job.track(schedule=schedule)
    return train(s, opt, schedule.step)


@row(RATES, "LambdaLR of `job.step`, without state")
def lr_by_step(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd()
    for batch in s.batches():
        for group in opt.param_groups:
            group["lr"] = 0.1 / (1 + s.job.step)
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(RATES, "the rate of one group set by hand in the middle")
def lr_by_hand(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.sgd()
    for batch in s.batches():
        if s.job.step >= 6:  # (a worker that was late may see no iteration 6)
            opt.param_groups[0]["lr"] = 0.01
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(RATES, "`opt.state_dict()` read after training: step counts and rates")
def optimizer_state(es: Any) -> Result:
    s = Script(es)
    opt = s.of(torch.optim.Adam(s.model.dense(), lr=0.01))
    out = train(s, opt)
    state = opt.state_dict()
    out["steps"] = torch.stack([torch.as_tensor(float(f["step"])) for f in state["state"].values()]).numpy()
    out["lr"] = torch.tensor(state["param_groups"][0]["lr"]).numpy()
    return out


@row(RATES, "`opt.add_param_group` before the loop")
def group_added(es: Any) -> Result:
    s = Script(es)
    opt = torch.optim.SGD(s.model.first.parameters(), lr=0.1)
    opt.add_param_group({"params": list(s.model.last.parameters()), "lr": 0.05})
    return train(s, s.of(opt))
