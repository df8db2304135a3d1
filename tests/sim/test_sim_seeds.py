"""The promises under thousands of seeded runs. A failure names the one command that repeats it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from everstep.sim.__main__ import chunk, main, seeds_of, totals
from everstep.sim.scenario import failover_scenario, random_scenario
from everstep.sim.simulation import simulate
from seeds import amounts


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", amounts(300, 3000))
def test_seeds_count_everything_once_and_none_is_stuck(seeds: int) -> None:
    chunks = [range(i, i + 75) for i in range(0, seeds, 75)]
    outcomes = []
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for done, failure, _ in pool.map(chunk, chunks):
            assert failure is None, f"{failure[1]}\nrepeat with: python -m everstep.sim --seed {failure[0]} --trace"
            outcomes += done
    assert len(outcomes) == seeds
    # The runs must be as rough as they claim to be, or the result says nothing.
    assert sum(o.masters - 1 for o in outcomes) > seeds
    assert sum(o.deaths for o in outcomes) > seeds
    assert sum(o.retried for o in outcomes) > seeds * 2 // 5  # what can be kept is not computed again
    print(totals(outcomes))


def test_the_same_seed_gives_the_same_run() -> None:
    first = [simulate(seed) for seed in range(20)]
    assert [simulate(seed) for seed in range(20)] == first
    assert len({o.crc for o in first}) == 20


def test_a_run_does_not_depend_on_the_hash_seed() -> None:
    code = "from everstep.sim.simulation import simulate; print([simulate(s).crc for s in range(30, 50)])"
    out = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        out.add(done.stdout)
    assert len(out) == 1


def test_a_master_that_is_killed_without_end_loses_nothing() -> None:
    outcome = simulate(3, failover_scenario(3))
    assert outcome.failovers > 50
    assert outcome.applied == 400 * 2 * 2  # positions, epochs, partitions


def test_every_kind_of_fault_is_met() -> None:
    agreed = {fault for seed in range(200) for _, fault in random_scenario(seed).faults}
    from everstep.sim.scenario import FAULTS

    assert agreed == set(FAULTS)


def test_tracing_changes_nothing_and_tells_the_story() -> None:
    lines: list[str] = []
    traced = simulate(7, trace=lines)
    assert traced == simulate(7)
    text = "\n".join(lines)
    assert "MasterStarted" in text and "started worker:0.1" in text and "over: 0" in text


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0..30", "--jobs", "1"]) == 0
    assert "every count right, none stuck" in capsys.readouterr().out
    assert main(["--seed", "4"]) == 0
    assert main(["--seed", "1", "--trace", "--mutation", "open-starts-over"]) == 1
    out = capsys.readouterr().out
    assert "Violation" in out and "FAULT" in out
    assert main(["--seed", "0", "--mutation", "nonsense"]) == 2


def test_ranges_of_seeds() -> None:
    assert seeds_of("5..9") == range(5, 9)
    assert seeds_of("0..100:10") == range(0, 100, 10)
    assert seeds_of("12") == range(0, 12)


def test_an_agent_stopped_until_its_node_is_lost_comes_back() -> None:
    """Seed 52577 of the full fault mix: its connection lived on, so it never said hello again."""
    assert simulate(52577).faults > 0


@pytest.mark.parametrize("seed", [69673, 80173])
def test_a_life_that_is_over_vouches_for_nothing_while_the_map_waits(seed: int) -> None:
    """A ps came back behind what it had acknowledged while the map waited for another one: its dead life's
    acknowledgements still counted."""
    assert simulate(seed).faults > 0
