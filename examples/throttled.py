"""A policy of one's own: whoever is throttled takes less of a step.

everstep run --mode allreduce --workers 4 --policy throttled:choose examples/04_fashion_mnist.py
"""

from everstep.model.decision import Decision
from everstep.model.plan import AdjustBatch, Plan
from everstep.policies.stragglers.shares import proportional


def choose(seen, state):
    if len(seen.workers) < 2 or not seen.global_batch:
        return None, state
    speeds = [1.0 - min(0.9, w.throttled_share) for w in seen.workers]
    shares = proportional(seen.global_batch, speeds)
    wanted = {w.slot: n for w, n in zip(seen.workers, shares, strict=True)}
    if wanted == state:
        return None, state
    why = Decision("adjust batches", "by throttling", {str(w): w.throttled_share for w in seen.workers})
    return Plan(actions=(AdjustBatch(batch=wanted),), decision=why), wanted
