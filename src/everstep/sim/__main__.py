"""``python -m everstep.sim``: run seeds, replay one, or plant bugs.

--seed 17 [--trace]    one run; a readable trace of everything that happened
--seeds 0..3000        many (also A..B:STEP); stops at the first failure, prints the command that repeats it
--mutations            plant each bug and say which seed finds it
--record FILE          plant each bug (or --mutation NAME) and write three seeds that find it to this JSON file
--mix group            runs of mode allreduce: workers, masters and nodes are lost, stopped, cut off, scaled, drained
--mix hybrid           as group, with tables on ps to which committed steps are pushed
--mix hybrid-lag       as hybrid, with mirrors that lag and ps that are lost
--mix resume           as ps; besides, the whole job ends and another goes on from a checkpoint, on other numbers
--mix paced            runs of consistency sync and bounded
--mix suspend          jobs that are suspended, by hand and by themselves, and go on in the same journal
--mix machines         runs in which ps stand on several machines, which are lost whole, cut off, and come back
--mix lag              as ps; mirrors may be behind (protect: lag)
--mix ps               runs in which ps keep mirrors and are lost, moved and scaled; else only workers and masters are
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from everstep.sim.group import group_scenario, simulate_group
from everstep.sim.hybrid import hybrid_lag_scenario, hybrid_scenario, simulate_hybrid
from everstep.sim.mutations import MUTATIONS, Mutation, catch, planted
from everstep.sim.mutations_group import GROUP_MUTATIONS
from everstep.sim.mutations_hybrid import HYBRID_LAG_MUTATIONS, HYBRID_MUTATIONS
from everstep.sim.mutations_lag import LAG_MUTATIONS
from everstep.sim.mutations_machines import MACHINE_MUTATIONS
from everstep.sim.mutations_paced import PACED_MUTATIONS
from everstep.sim.mutations_ps import PS_MUTATIONS
from everstep.sim.mutations_resume import RESUME_MUTATIONS
from everstep.sim.resume import resume_scenario, simulate_resume
from everstep.sim.scenario import lag_scenario, machines_scenario, paced_scenario, random_scenario, storm_scenario
from everstep.sim.simulation import Parts, SimOutcome, simulate
from everstep.sim.suspend import simulate_suspend, suspend_scenario

CHUNK = 100
RECORDED, MOST = 3, 3000  # seeds for each planted bug, and how many are searched for them
MIXES: dict[str, tuple[Callable[[int], Any], tuple[Mutation, ...], Callable[..., SimOutcome]]] = {
    "jobs": (random_scenario, MUTATIONS, simulate),
    "paced": (paced_scenario, PACED_MUTATIONS, simulate),
    "ps": (storm_scenario, PS_MUTATIONS, simulate),
    "lag": (lag_scenario, LAG_MUTATIONS, simulate),
    "machines": (machines_scenario, MACHINE_MUTATIONS, simulate),
    "resume": (resume_scenario, RESUME_MUTATIONS, simulate_resume),
    "suspend": (suspend_scenario, (), simulate_suspend),
    "hybrid": (hybrid_scenario, HYBRID_MUTATIONS, simulate_hybrid),
    "hybrid-lag": (hybrid_lag_scenario, HYBRID_LAG_MUTATIONS, simulate_hybrid),
    "group": (group_scenario, GROUP_MUTATIONS, simulate_group),
}


def seeds_of(text: str) -> range:
    """Return ``A..B`` or ``A..B:STEP`` as a range; a plain number is 0..N."""
    span, _, step = text.partition(":")
    a, dots, b = span.partition("..")
    return range(int(a), int(b), int(step or 1)) if dots else range(0, int(a), int(step or 1))


def chunk(seeds: range, mix: str = "jobs") -> tuple[list[SimOutcome], tuple[int, str] | None, float]:
    """Return outcomes of ``seeds`` up to the first failure, the failure, and CPU seconds spent."""
    began = time.process_time()
    done: list[SimOutcome] = []
    failure = None
    scenario_of, _, run = MIXES[mix]
    for seed in seeds:
        try:
            done.append(run(seed, scenario_of(seed)))
        except Exception as error:  # whatever it is, the seed that shows it must be told
            failure = seed, f"{type(error).__name__}: {error}"
            break
    return done, failure, time.process_time() - began


def totals(outcomes: list[SimOutcome]) -> str:
    """Counts over many runs in one line."""
    masters, deaths = sum(o.masters - 1 for o in outcomes), sum(o.deaths for o in outcomes)
    return (
        f"{len(outcomes)} runs, {sum(o.faults for o in outcomes)} faults, {masters} master deaths, {deaths} worker "
        f"deaths, {sum(o.applied for o in outcomes)} counts applied, {sum(o.retried for o in outcomes)} batches retried"
    )


def many(seeds: range, jobs: int, mix: str) -> Iterator[tuple[list[SimOutcome], tuple[int, str] | None, float]]:
    """Yield chunks of ``seeds``, in order, computed by ``jobs`` processes."""
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    if jobs <= 1:
        yield from map(chunk, chunks, repeat(mix))
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(chunk, chunks, repeat(mix))


def run_seeds(seeds: range, jobs: int, mix: str) -> int:
    outcomes: list[SimOutcome] = []
    cpu_s, shown_at = 0.0, time.monotonic()
    for done, failure, spent in many(seeds, jobs, mix):
        outcomes += done
        cpu_s += spent
        if failure is not None:
            print(f"seed {failure[0]}: {failure[1]}")
            print(f"repeat with: python -m everstep.sim --mix {mix} --seed {failure[0]} --trace")
            return 1
        if time.monotonic() - shown_at > 2.0:
            shown_at = time.monotonic()
            print(f"  {totals(outcomes)}", flush=True)
    print(f"{totals(outcomes)}: every count right, none stuck ({cpu_s:.1f} s of CPU)")
    return 0


def run_one(seed: int, trace: bool, mutation: str, mix: str) -> int:
    lines: list[str] = []
    scenario_of, mutations, run = MIXES[mix]
    chosen = [m for m in mutations if m.name == mutation]
    if mutation and not chosen:
        print(f"no mutation is called {mutation!r}; there are: {', '.join(m.name for m in mutations)}", file=sys.stderr)
        return 2
    error: Exception | None = None
    try:
        if chosen:
            with planted(chosen[0]) as parts:
                outcome = run(seed, scenario_of(seed), parts, lines)
        else:
            outcome = run(seed, scenario_of(seed), trace=lines)
    except Exception as caught:
        error = caught
    if trace:
        print(f"seed {seed}: {scenario_of(seed)}")
        print("\n".join(lines))
    if error is not None:
        print(f"seed {seed}: {type(error).__name__}: {error}")
        return 1
    print(f"seed {seed}: {outcome}")
    return 0


def run_mutations(seeds: range, mix: str) -> int:
    missed = 0
    scenario_of, mutations, simulation = MIXES[mix]

    def run(seed: int, parts: Parts) -> SimOutcome:
        return simulation(seed, scenario_of(seed), parts)

    for mutation in mutations:
        found = catch(mutation, seeds, run)
        if found is None:
            missed += 1
            print(f"MISSED {mutation.name:<22} {mutation.what}")
        else:
            print(f"{found[0] - seeds.start + 1:6} seeds  {mutation.name:<22} {found[1]:.120}", flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} planted bugs caught")
    return 1 if missed else 0


def record(path: Path, mix: str, name: str) -> int:
    """Write to ``path`` which seeds catch each bug of ``mix``; 1 if one is not caught in as many as MOST."""
    scenario_of, mutations, simulation = MIXES[mix]

    def run(seed: int, parts: Parts) -> SimOutcome:
        return simulation(seed, scenario_of(seed), parts)

    caught = json.loads(path.read_text()) if path.exists() else {}
    mine = caught.setdefault(mix, {})
    missed = 0
    for mutation in [m for m in mutations if name in ("", m.name)]:
        seeds: list[int] = []
        while len(seeds) < RECORDED:
            found = catch(mutation, range(seeds[-1] + 1 if seeds else 0, MOST), run)
            if found is None:
                break
            seeds.append(found[0])
        mine[mutation.name] = seeds
        missed += not seeds
        print(f"{mutation.name:<22} {seeds}", flush=True)
        text = ",\n".join(
            f"  {json.dumps(m)}: {{\n"
            + ",\n".join(f"    {json.dumps(bug)}: {json.dumps(found)}" for bug, found in caught[m].items())
            + "\n  }"
            for m in sorted(caught)
        )
        path.write_text(f"{{\n{text}\n}}\n")
    return 1 if missed else 0


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m everstep.sim", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    parser.add_argument("--mutation", default="", help="with --seed, --record: plant this bug")
    parser.add_argument("--seeds", type=seeds_of, default=range(0, 3000), help="A..B, default 0..3000")
    parser.add_argument("--mutations", action="store_true", help="plant every bug in turn")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes for --seeds")
    parser.add_argument("--mix", choices=sorted(MIXES), default="jobs", help="kind of runs")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write seeds that catch the planted bugs to it")
    chosen = parser.parse_args(args)
    if chosen.record is not None:
        return record(chosen.record, chosen.mix, chosen.mutation)
    if chosen.seed is not None:
        return run_one(chosen.seed, chosen.trace, chosen.mutation, chosen.mix)
    if chosen.mutations:
        return run_mutations(chosen.seeds, chosen.mix)
    return run_seeds(chosen.seeds, chosen.jobs, chosen.mix)


if __name__ == "__main__":
    sys.exit(main())
