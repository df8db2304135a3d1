"""The simulator: master failovers per CPU-minute, seeds run, planted bugs caught.

A failover is a master that is killed after everyone alive had joined it; the next one replays the journal from its
newest snapshot and everyone joins again. The brain checks its invariants after every event meanwhile.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from everstep.sim.__main__ import chunk
from everstep.sim.mutations import MUTATIONS, catch
from everstep.sim.scenario import failover_scenario
from everstep.sim.simulation import simulate


def failovers_per_minute(seeds: range) -> tuple[float, int]:
    """Failovers per minute of CPU over these runs, and how many they were."""
    began = time.process_time()
    count = sum(simulate(seed, failover_scenario(seed)).failovers for seed in seeds)
    return count / (time.process_time() - began) * 60.0, count


def run(quick: bool) -> dict[str, Any]:
    """Figures, aims, whether they hold, and the spread over repetitions."""
    rounds, width, seeds = (3, 4, 300) if quick else (7, 10, 3000)
    failovers_per_minute(range(2))  # warm up
    measured = [failovers_per_minute(range(i * width, (i + 1) * width)) for i in range(rounds)]
    rates = [rate for rate, _ in measured]
    outcomes, failure, cpu_s = chunk(range(seeds))
    within = range(300 if quick else 3000)
    needed = {m.name: catch(m, within) for m in MUTATIONS}
    caught = [found[0] + 1 for found in needed.values() if found is not None]
    figures: dict[str, Any] = {
        "failovers_per_cpu_minute": round(statistics.median(rates)),
        "failovers": sum(n for _, n in measured),
        "seeds": len(outcomes),
        "seeds_failed": 0 if failure is None else 1,
        "ms_cpu_per_seed": round(cpu_s / max(1, len(outcomes)) * 1e3, 2),
        "master_deaths": sum(o.masters - 1 for o in outcomes),
        "worker_deaths": sum(o.deaths for o in outcomes),
        "faults": sum(o.faults for o in outcomes),
        "counts_applied": sum(o.applied for o in outcomes),
        "mutations": len(MUTATIONS),
        "mutations_caught": len(caught),
        "seeds_needed_median": statistics.median(caught) if caught else None,
        "seeds_needed_most": max(caught, default=None),
    }
    if failure is not None:
        figures["first_failure"] = f"python -m everstep.sim --seed {failure[0]} --trace"
    aims = {
        "failovers_per_cpu_minute": ">= 50000",
        "seeds_failed": "0",
        "mutations_caught": ">= 15" + ("" if quick else ", all"),
    }
    holds = {
        "failovers_per_cpu_minute": figures["failovers_per_cpu_minute"] >= 50_000,
        "seeds_failed": failure is None,
        "mutations_caught": len(caught) >= 15 if quick else len(caught) == len(MUTATIONS),
    }
    return {
        "figures": figures,
        "aims": aims,
        "holds": holds,
        "spread": {"failovers_per_cpu_minute": [round(min(rates)), round(max(rates))]},
    }


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(run("--quick" in sys.argv), indent=2))
