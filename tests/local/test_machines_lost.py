"""Ps on three machines that share nothing: one vanishes whole, or its link is cut, while training goes on.

Any machine but the master's: the job ends well, the audit is exact, and so is the counting model of its samples.
``EVERSTEP_SEED`` chooses the moment; ``EVERSTEP_ROUNDS`` how many moments are tried.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
from local_jobs import Run, until

from machines import Machines, three_machines

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(390)]

ROUNDS = int(os.environ.get("EVERSTEP_ROUNDS", "1"))
SEED = int(os.environ.get("EVERSTEP_SEED", "1"))


@pytest.fixture
def machines(run: Run) -> Iterator[Machines]:
    with three_machines(run) as made:
        made.write()
        yield made


def ended(machines: Machines) -> str:
    """The job ends well, counted by the audit and by the model; what the audit notes."""
    run = machines.run
    run.hurry()
    assert run.wait(200) == 0, run.story()
    code, text = run.everstep("audit", str(run.run_dir), "--witness")
    assert code == 0 and "exactly once" in text, text
    model = run.run_dir / "model" / "dense.safetensors"
    assert model.exists(), run.text()
    return text


def covered(machines: Machines) -> bool:
    view = machines.run.status()
    found = view.protection if view is not None else None
    return found is not None and found.full == 64 and not found.lost_with_machine and not found.rebuilding


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_a_machine_vanishes_whole(machines: Machines, round_: int) -> None:
    rng = random.Random(f"vanish {SEED} {round_}")
    run, lost, after_s = machines.run, rng.choice("bc"), rng.choice([0.0, 1.0, 4.0]) + rng.random() * 3
    checkpoints = rng.random() < 0.5
    flags = ("--checkpoint-every", "2s") if checkpoints else ()
    machines.start("--workers", "1", "--ps", "6", "--parity", "2+1", "--nodes", "3", *flags)
    until(lambda: covered(machines), why=run.story)
    view = machines.training()
    assert {m.node for m in view.members if m.role == "ps"} == {"node0", "b", "c"}
    time.sleep(after_s)
    machines.vanish(lost)
    began = time.monotonic()
    until(lambda: (v := run.status()) is not None and v.failures["node"] >= 1, why=run.story)
    found_s = time.monotonic() - began
    until(lambda: covered(machines), why=run.story)
    whole_s = time.monotonic() - began
    print(f"round {round_}: {lost} after {after_s:.1f} s, noticed {found_s:.1f} s, covered {whole_s:.1f} s")
    text = ended(machines)
    assert f"{lost} was lost with the end of the logs of" in text, text


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("seconds", [1.0, 5.0, 30.0])
def test_a_link_is_cut(machines: Machines, seconds: float, round_: int) -> None:
    rng = random.Random(f"cut {SEED} {round_} {seconds}")
    run, name = machines.run, rng.choice("bc")
    machines.start("--workers", "1", "--ps", "6", "--parity", "2+1", "--nodes", "3")
    until(lambda: covered(machines), why=run.story)
    machines.training()
    time.sleep(rng.random() * 3)
    machines.cut(name, seconds)
    until(lambda: covered(machines), why=run.story)
    print(f"round {round_}: {name} for {seconds:g} s; {run.status().failures if run.status() else ''}")
    ended(machines)


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("seconds", [1.0, 5.0, 30.0])
def test_a_machine_hears_nothing_and_is_heard(machines: Machines, seconds: float, round_: int) -> None:
    rng = random.Random(f"deaf {SEED} {round_} {seconds}")
    run, name = machines.run, rng.choice("bc")
    machines.start("--workers", "1", "--ps", "6", "--parity", "2+1", "--nodes", "3")
    until(lambda: covered(machines), why=run.story)
    machines.training()
    time.sleep(rng.random() * 3)
    machines.deafen(name, seconds)
    until(lambda: covered(machines), why=run.story)
    ended(machines)


def test_a_machine_comes_back_and_gets_ps_again(machines: Machines) -> None:
    run = machines.run
    machines.start("--workers", "1", "--ps", "6", "--parity", "2+1", "--nodes", "3")
    until(lambda: covered(machines), why=run.story)
    machines.training()
    machines.vanish("b")
    until(lambda: (v := run.status()) is not None and v.failures["node"] >= 1, why=run.story)
    machines.cable("b", True)
    machines.join("b", "b2")

    def even() -> bool:
        view = run.status()
        nodes = [m.node for m in view.members if m.role == "ps" and m.up] if view is not None else []
        return sorted(nodes) == ["b2", "b2", "c", "c", "node0", "node0"] and covered(machines)

    until(even, why=run.story)
    machines.vanish("c")
    until(lambda: (v := run.status()) is not None and v.failures["node"] >= 2, why=run.story)
    until(lambda: covered(machines), why=run.story)
    ended(machines)
