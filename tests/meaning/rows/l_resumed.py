"""Jobs that are stopped or killed in the middle, and resumed."""

from __future__ import annotations

from typing import Any

import torch

from meaning.interrupted import here
from meaning.kit import Script
from meaning.table import Result, row, topic

RESUMED = topic("Stopped, killed, resumed")
ALONE = {
    "alone allreduce logical passes hybrid": "`python train.py` leaves no checkpoint: to stop and resume a job of one "
    "worker, run it with `everstep run --workers 1`."
}
CRASH = {
    **ALONE,
    "async bounded sync": "The checkpoint's partitions are of different moments: batches that some of them lack are "
    "computed again for these, from the mix.",
}
COUNT = {
    **ALONE,
    "async bounded sync": "In mode ps `job.step` counts anew in a resumed job. Schedulers that `job.track` was given "
    "go on.",
}


def train(es: Any) -> Result:
    s = Script(es, table=None)
    opt = s.of(torch.optim.AdamW(s.model.parameters(), lr=0.02, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.8)
    s.job.track(schedule=schedule)
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        schedule.step()
        here(s.job, 4)
    out = s.end()
    del out["each.loss"]  # (of the second life alone)
    return out


@row(RESUMED, "`everstep stop` in the middle, `everstep resume`: AdamW, a schedule", stated=ALONE, interrupt="stop")
def stopped(es: Any) -> Result:
    return train(es)


@row(RESUMED, "all processes killed in the middle (`kill -9`), `everstep resume`", stated=CRASH, interrupt="crash")
def crashed(es: Any) -> Result:
    return train(es)


@row(RESUMED, "`job.step` in a resumed job", stated=COUNT, interrupt="stop")
def step_resumed(es: Any) -> Result:
    s = Script(es)
    opt, last = s.sgd(), -1
    for batch in s.batches():
        last = s.job.step
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
        here(s.job, 4)
    return {"last": torch.tensor(last).numpy(), "whole": s.end()["0.first.weight"]}
