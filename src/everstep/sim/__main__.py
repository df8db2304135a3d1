"""``python -m everstep.sim``: run seeds, replay one, or plant bugs.

--seed 17 [--trace]    one run; a readable trace of everything that happened
--seeds 0..3000        many (also A..B:STEP); stops at the first failure, prints the command that repeats it
--mutations            plant each bug and say which seed finds it
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from everstep.sim.mutations import MUTATIONS, catch, planted
from everstep.sim.run import Outcome, simulate
from everstep.sim.scenario import random_scenario

CHUNK = 100


def seeds_of(text: str) -> range:
    """``A..B`` or ``A..B:STEP`` as a range; a plain number is 0..N."""
    span, _, step = text.partition(":")
    a, dots, b = span.partition("..")
    return range(int(a), int(b), int(step or 1)) if dots else range(0, int(a), int(step or 1))


def chunk(seeds: range) -> tuple[list[Outcome], tuple[int, str] | None, float]:
    """Outcomes of ``seeds`` up to the first failure, the failure, and CPU seconds spent."""
    began = time.process_time()
    done: list[Outcome] = []
    failure = None
    for seed in seeds:
        try:
            done.append(simulate(seed))
        except Exception as error:  # whatever it is, the seed that shows it must be told
            failure = seed, f"{type(error).__name__}: {error}"
            break
    return done, failure, time.process_time() - began


def totals(outcomes: list[Outcome]) -> str:
    """Counts over many runs in one line."""
    masters, deaths = sum(o.masters - 1 for o in outcomes), sum(o.deaths for o in outcomes)
    return (
        f"{len(outcomes)} runs, {sum(o.faults for o in outcomes)} faults, {masters} master deaths, {deaths} worker "
        f"deaths, {sum(o.applied for o in outcomes)} counts applied, {sum(o.retried for o in outcomes)} batches retried"
    )


def many(seeds: range, jobs: int) -> Iterator[tuple[list[Outcome], tuple[int, str] | None, float]]:
    """Chunks of ``seeds``, in order, computed by ``jobs`` processes."""
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    if jobs <= 1:
        yield from map(chunk, chunks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(chunk, chunks)


def run_seeds(seeds: range, jobs: int) -> int:
    outcomes: list[Outcome] = []
    cpu_s, told = 0.0, time.monotonic()
    for done, failure, spent in many(seeds, jobs):
        outcomes += done
        cpu_s += spent
        if failure is not None:
            print(f"seed {failure[0]}: {failure[1]}")
            print(f"repeat with: python -m everstep.sim --seed {failure[0]} --trace")
            return 1
        if time.monotonic() - told > 2.0:
            told = time.monotonic()
            print(f"  {totals(outcomes)}", flush=True)
    print(f"{totals(outcomes)}: every count right, none stuck ({cpu_s:.1f} s of CPU)")
    return 0


def run_one(seed: int, trace: bool, mutation: str) -> int:
    lines: list[str] = []
    chosen = [m for m in MUTATIONS if m.name == mutation]
    if mutation and not chosen:
        print(f"no mutation is called {mutation!r}; there are: {', '.join(m.name for m in MUTATIONS)}", file=sys.stderr)
        return 2
    error: Exception | None = None
    try:
        if chosen:
            with planted(chosen[0]) as parts:
                outcome = simulate(seed, parts=parts, trace=lines)
        else:
            outcome = simulate(seed, trace=lines)
    except Exception as caught:
        error = caught
    if trace:
        print(f"seed {seed}: {random_scenario(seed)}")
        print("\n".join(lines))
    if error is not None:
        print(f"seed {seed}: {type(error).__name__}: {error}")
        return 1
    print(f"seed {seed}: {outcome}")
    return 0


def run_mutations(seeds: range) -> int:
    missed = 0
    for mutation in MUTATIONS:
        found = catch(mutation, seeds)
        if found is None:
            missed += 1
            print(f"MISSED {mutation.name:<22} {mutation.what}")
        else:
            print(f"{found[0] - seeds.start + 1:6} seeds  {mutation.name:<22} {found[1]:.120}", flush=True)
    print(f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} planted bugs caught")
    return 1 if missed else 0


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m everstep.sim", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    parser.add_argument("--mutation", default="", help="with --seed: plant this bug")
    parser.add_argument("--seeds", type=seeds_of, default=range(0, 3000), help="A..B, default 0..3000")
    parser.add_argument("--mutations", action="store_true", help="plant every bug in turn")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes for --seeds")
    chosen = parser.parse_args(args)
    if chosen.seed is not None:
        return run_one(chosen.seed, chosen.trace, chosen.mutation)
    if chosen.mutations:
        return run_mutations(chosen.seeds)
    return run_seeds(chosen.seeds, chosen.jobs)


if __name__ == "__main__":
    sys.exit(main())
