"""Says on paper in which share of iterations a copy of the state fits the bubbles, by shape of pipeline and bandwidth.

No process runs: ideal 1F1B pipelines (``policies.ideal_pipeline``), with the scheduler that plans copies for real ones.
A model of N parameters in P stages and D replicas. A microbatch is one sequence of 2,048 tokens; forward costs 2
floating point operations for each parameter and token at 150 TFLOP/s, backward twice that. The state is 12 bytes a
parameter (values and Adam's averages in float32), and each of the D replicas of a stage copies its part of it. Of each
span 80 % is used, in chunks of at most 32 MB. ``share``: of iterations, 1 where the snapshot is inside of spans, else
one in as many as keep stalls below 1 %, of the stage that fits worst. ``persist``: iterations until a neighbour has it
(3 GB/s), of that stage, with a snapshot in one of ten iterations; -1: more than 1,000.
"""

from __future__ import annotations

from typing import Final

from benchmarks._measure import Result, say
from everstep.policies.bubble_schedule import CopyPhase, CopyTask, SpanUse, plan_copies, snapshot_interval
from everstep.policies.ideal_pipeline import IdealSchedule, ideal_spans

TOKENS, FLOPS, STATE_BYTES = 2048, 150e12, 12
USE: Final = SpanUse(chunk_bytes=32 << 20, least_bytes=1 << 20)
NEIGHBOUR_BYTES_PER_S = 3e9
SIZES = {"30m": 30e6, "7b": 7e9, "70b": 70e9}
SHAPES = ((2, 1), (4, 1), (8, 1), (8, 8), (16, 1), (64, 128))  # stages, replicas
RATES = {"5gbs": 5e9, "20gbs": 20e9}  # of a copy out of the device
MICROBATCHES = (1, 8)  # for each stage


def fit(parameters: float, stages: int, replicas: int, microbatches: int, rate: float) -> tuple[float, int]:
    """Return the share of iterations with a snapshot, and iterations until it is persisted, of the worst stage."""
    forward_s = 2 * parameters / stages * TOKENS / FLOPS
    spans = ideal_spans(IdealSchedule.ONE_F_ONE_B, stages, microbatches, forward_s, 2 * forward_s)
    window_s = (microbatches + stages - 1) * 3 * forward_s
    size = int(STATE_BYTES * parameters / stages / replicas)
    tasks = [
        CopyTask("snapshot", CopyPhase.SNAPSHOT, size, rate),
        CopyTask("neighbour", CopyPhase.PERSIST, size, NEIGHBOUR_BYTES_PER_S),
    ]
    shares, persisted = [], []
    for stage in {0, stages // 2, stages - 1}:
        plan = plan_copies(spans[stage], tasks, USE, every=10)
        shares.append(1.0 / snapshot_interval(plan.stall_s, window_s))
        persisted.append(plan.persisted_after)
    return min(shares), -1 if -1 in persisted else max(persisted)


def run(quick: bool) -> Result:
    """Plan every combination, each once: there is nothing to measure."""
    figures: dict[str, float] = {}
    for name, parameters in SIZES.items():
        for stages, replicas in SHAPES[:4] if quick else SHAPES:
            for times in MICROBATCHES:
                for words, rate in RATES.items():
                    share, persist = fit(parameters, stages, replicas, times * stages, rate)
                    key = f"{name}.p{stages}_d{replicas}_m{times * stages}_{words}"
                    figures[f"{key}.share"], figures[f"{key}.persist"] = share, persist
                    say(f"{key}: a snapshot in {100 * share:.1f} % of iterations, persisted after {persist}")
    return {"figures": figures, "aims": {}, "holds": {}, "spread": {}}
