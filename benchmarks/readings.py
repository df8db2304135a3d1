"""What it costs the training thread that every step is measured (phases, own compute, the beat's share of it).

The clock's calls of one step are timed by themselves, exactly as the loop of mode allreduce makes them, and set against
the time of a step: of the smallest that makes sense (5 ms), and of a real small model here, alone in one process. The
reading of a beat (twice a second, on another thread, holding the interpreter) is counted too.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from typing import Any

from everstep.monitor import stepclock
from everstep.monitor.process_readings import ProcessReadings
from everstep.monitor.stepclock import StepClock

SMALL_STEP_S = 0.005
AIM = 0.005
BEATS_PER_S = 2.0


def one_step(clock: StepClock) -> None:
    """As GroupEngine does in a step of one micro-batch."""
    clock.switch(stepclock.BARRIER)
    clock.switch(stepclock.DATA)
    clock.switch(stepclock.FORWARD)
    clock.first_gradient()
    clock.computed(32)
    clock.switch(stepclock.BARRIER)
    clock.switch(stepclock.UPDATE)


def step_cost_s(steps: int) -> float:
    clock = StepClock()
    began = time.perf_counter()
    for _ in range(steps):
        one_step(clock)
    return (time.perf_counter() - began) / steps


def beat_cost_s(beats: int) -> float:
    clock, process = StepClock(), ProcessReadings()
    spent = 0.0
    for _ in range(beats):
        for _ in range(100):
            one_step(clock)
        began = time.perf_counter()
        {**clock.readings(), **process.readings()}
        spent += time.perf_counter() - began
    return spent / beats


def real_step_s(steps: int) -> float:
    """Of a model of three small layers, batch 64: median seconds of a step."""
    import numpy as np
    import torch
    from torch import nn

    import everstep as es

    torch.set_num_threads(1)
    job = es.join(mode="allreduce")
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((64 * steps, 256), np.float32), "y": rng.integers(0, 10, 64 * steps)}
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = job.replicate(net)
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    times = []
    began = time.perf_counter()
    for batch in job.steps(job.loader(data, batch_size=64, epochs=1)):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        now = time.perf_counter()
        times.append(now - began)
        began = now
    return statistics.median(times)


def run(quick: bool) -> dict[str, Any]:
    rounds = 3 if quick else 9
    steps = [step_cost_s(5_000) for _ in range(rounds)]
    beats = [beat_cost_s(50) for _ in range(rounds)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        real_s = real_step_s(200 if quick else 1000)
    step_s, beat_s = statistics.median(steps), statistics.median(beats)

    def share(of_s: float) -> float:
        return step_s / of_s + beat_s * BEATS_PER_S

    figures = {
        "clock_us_per_step": step_s * 1e6,
        "beat_us": beat_s * 1e6,
        "share_of_a_5ms_step": share(SMALL_STEP_S),
        "real_step_ms": real_s * 1e3,
        "share_of_the_real_step": share(real_s),
    }
    aims = {"share_of_a_5ms_step": f"< {AIM}", "share_of_the_real_step": f"< {AIM}"}
    return {
        "figures": figures,
        "aims": aims,
        "holds": {name: figures[name] < AIM for name in aims},
        "spread": {
            "clock_us_per_step": (min(steps) * 1e6, max(steps) * 1e6),
            "beat_us": (min(beats) * 1e6, max(beats) * 1e6),
        },
    }
