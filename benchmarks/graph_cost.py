"""What ``everstep graph`` costs at the default sampling: extra time of a sampled step, spread over the steps between.

One loop has both sides: of each six steps the first is sampled and five are not, so a drift of the machine meets all
alike. A sample's cost lies in its step and in the one behind it. So the extra time is the median of (these two - the
last two of the six). ``auto`` says, in the same script, how many steps lie between two samples. The share is the
extra time over the time of these steps, plus what the loop's own counting takes of a step. ``.aa`` is the same sum
with the two steps in the middle in place of the first two. Three scripts: many small modules (a step of some
milliseconds, the worst case), a usual model, and a model with a table on the ps.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks._measure import each_round, median, say, spread

AIM = 0.005
_OF = 6  # one step in so many is sampled here


def _net(modules: int, width: int) -> Any:
    from torch import nn

    return nn.Sequential(
        *(m for _ in range(modules) for m in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 1)
    )


def _embedded(rows: int, width: int) -> Any:
    import torch
    from torch import Tensor, nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(rows, 16)
            self.body = nn.Sequential(nn.Linear(16 * 16, width), nn.ReLU(), nn.Linear(width, 1))

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.body(torch.flatten(self.table(ids), 1))
            return out

    return Net()


def _data(kind: str, samples: int, width: int) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.integers(0, 20_000, (samples, 16)) if kind == "table" else rng.standard_normal((samples, width), np.float32)
    return {"x": x, "y": rng.standard_normal(samples).astype(np.float32)}


SCRIPTS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "small": (lambda: _net(40, 64), 64, 64),
    "usual": (lambda: _net(6, 512), 512, 256),
    "table": (lambda: _embedded(20_000, 128), 256, 256),
}
"""By name: model, width of the data, batch size."""


def _loop(kind: str, every: str, steps: int) -> tuple[list[float], Any]:
    """Train so many steps; return the time of each, from batch to batch, and the sampler."""
    import torch

    import everstep as es
    from everstep.api.graph_sampler import GraphSampler

    torch.set_num_threads(1)
    make, width, batch = SCRIPTS[kind]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        job = es.join(run_dir=folder + "/run", seed=1)
        model = make()
        model = job.replicate(job.sparse(model) if kind == "table" else model)
        opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        sampler = GraphSampler(job._trainer, every)
        times: list[float] = []
        began = time.perf_counter()
        loader = job.loader(_data(kind, batch * 50, width), batch_size=batch, epochs=-(-steps // 50))
        with contextlib.redirect_stdout(None):
            for found in sampler.steps(job._trainer.steps(loader)):
                loss = (model(found["x"]).squeeze(1) - found["y"]).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                now = time.perf_counter()
                times.append(now - began)
                began = now
            job.close()
    return times, sampler


def _counting_s(steps: int) -> float:
    """Return what the sampler's loop costs a step that it does not sample."""
    from everstep.api.graph_sampler import GraphSampler

    class Nothing:
        models: tuple[Any, ...] = ()

    def loop(batches: Iterator[int]) -> float:
        began = time.perf_counter()
        for _ in batches:
            pass
        return time.perf_counter() - began

    watched = GraphSampler(Nothing(), str(10**9))  # type: ignore[arg-type]
    watched._begin = lambda: None  # type: ignore[method-assign]
    watched._end = lambda recorder, step_s: None  # type: ignore[method-assign]
    watched.every = 10**9
    with_s = loop(watched.steps(iter(range(steps))))
    return max(0.0, with_s - loop(iter(range(steps)))) / steps


def extra_s(times: list[float], at: int) -> float:
    """Return the median of (steps ``at`` and the next - the last two), over all groups of six."""
    groups = [times[i : i + _OF] for i in range(0, len(times) - _OF + 1, _OF)]
    return statistics.median(g[at] + g[at + 1] - g[4] - g[5] for g in groups)


class _Measured(NamedTuple):
    """Is one round of one script: shares of a step's time, and what they come from."""

    share: float
    same: float
    step_s: float
    extra_s: float
    every: float


def _measure(kind: str, steps: int, counting_s: float) -> _Measured:
    times, sampler = _loop(kind, "auto", steps)
    every = sampler.every
    times, sampler = _loop(kind, str(_OF), steps)
    times = times[_OF * 5 - 1 :]  # the sampler takes the last step of each six: begin the groups there
    step_s = statistics.median(times[4::_OF])
    extra = extra_s(times, 0)
    return _Measured(
        (extra / every + counting_s) / step_s, extra_s(times, 2) / every / step_s, step_s, extra, float(every)
    )


def run(quick: bool) -> dict[str, Any]:
    rounds, steps = (2, 240) if quick else (5, 600)
    counting_s = statistics.median(_counting_s(100_000) for _ in range(5))
    figures: dict[str, float] = {"counting_us": counting_s * 1e6}
    spreads: dict[str, tuple[float, float]] = {}
    found: dict[str, list[_Measured]] = {kind: [] for kind in SCRIPTS}
    for number in each_round(rounds):
        for kind, ones in found.items():
            ones.append(_measure(kind, steps, counting_s))
            say(f"round {number + 1}/{rounds} {kind}: {ones[-1]}")
    for kind, ones in found.items():
        figures |= {
            f"{kind}_share": median([one.share for one in ones]),
            f"{kind}_share.aa": median([one.same for one in ones]),
            f"{kind}_step_ms": median([one.step_s * 1e3 for one in ones]),
            f"{kind}_sample_us": median([one.extra_s * 1e6 for one in ones]),
            f"{kind}_every": median([one.every for one in ones]),
        }
        spreads[f"{kind}_share"] = spread([one.share for one in ones])
        spreads[f"{kind}_share.aa"] = spread([one.same for one in ones])
    aims = {f"{kind}_share": f"< {AIM}" for kind in SCRIPTS}
    holds = {name: figures[name] < AIM for name in aims}
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}
