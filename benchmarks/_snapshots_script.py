"""The script of ``bubble_snapshots``: a pipeline whose stages check each copy against what they had before the step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

import everstep as es
from everstep.model.group import Position

WIDTH, BATCH, MICROBATCHES = 256, 16, 4


def network() -> nn.Sequential:
    """Return two halves: each has 1.6 MB of state with AdamW, which are seven blocks of a copy."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--copies", type=int, required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = es.join(mode="pipeline")
    x = torch.randn(BATCH * args.copies, 4, generator=torch.Generator().manual_seed(1))

    def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(out[:, :4], target)

    model = job.pipeline(
        network(), schedule=pipelining.Schedule1F1B, microbatches=MICROBATCHES, split=[4], loss_fn=loss_fn
    )
    opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    engine: Any = job._engine
    copies = engine.copies
    facts: dict[str, Any] = {"whole": 0, "other": [], "none": 0}
    for batch in job.steps(job.loader({"x": x.numpy()}, batch_size=BATCH, epochs=1)):
        step, truth = job.step, copies._state._serialized(Position(), 0, None)
        opt.zero_grad()
        given = batch["x"].repeat(1, WIDTH // 4)
        model.step(given, target=batch["x"].sin())
        opt.step()
        found = [(slot, head) for slot in copies._slots if (head := slot.head()) is not None and head.step == step]
        if not found:
            facts["none"] += 1
            continue
        header, body = found[0][0].read(found[0][1], f"the copy of step {step}")
        same = header == truth.header and torch.equal(torch.from_numpy(body), truth.body)
        if same:
            facts["whole"] += 1
        else:
            facts["other"].append(step)
    totals = copies.totals
    facts["copied"], facts["inside"] = totals.copied_bytes, totals.inside_bytes + totals.late_bytes
    facts["overruns"], facts["discarded"] = totals.overruns, totals.discarded
    (Path(args.out) / f"stage{job.process_index}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
