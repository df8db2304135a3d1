"""Mode allreduce with real processes that are killed, stopped, added and taken away at work: every sample once,
and the same bits on everybody in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from local_jobs import until
from node_jobs import Networks, free_port, join
from replica_jobs import KILL, STOP, ReplicaRun, logical_run

from everstep.cli.scale import scale
from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


RUN = ReplicaRun


def test_a_job_trains_to_its_end_and_leaves_nothing(run: ReplicaRun) -> None:
    run.write(epochs=1, pause_s=0.0)
    run.train(2, "--min-workers", "2").finished(states=2)
    for verb, words in {"audit": "exactly once", "replay": "every instruction is the same", "status": "done"}.items():
        code, out = run.everstep(verb, str(run.run_dir))
        assert code == 0 and words in out, out


def test_rank_0_is_killed_and_then_another(run: ReplicaRun) -> None:
    run.write(epochs=6, pause_s=0.1)
    run.train(3)
    for slot, samples in ((0, 500), (2, 3000)):
        run.trained(samples)
        os.kill(run.pid(slot), KILL)
        run.pid(slot, at_least=2)
    run.entered(0, 2)
    run.hurry()
    run.finished(2, states=3)


def test_two_of_three_are_killed_at_once(run: ReplicaRun) -> None:
    run.write(epochs=4)
    run.train(3)
    run.trained(500)
    for pid in (run.pid(0), run.pid(1)):
        os.kill(pid, KILL)
    run.pid(0, at_least=2)
    run.hurry()
    run.finished(2, states=1)


def test_another_one_dies_while_the_group_is_built_anew(run: ReplicaRun) -> None:
    run.write(epochs=4)
    run.train(4)
    run.trained(500)
    pids = [run.pid(slot) for slot in range(4)]
    for pid in pids[1:]:
        os.kill(pid, KILL)
        time.sleep(0.02)  # about as long as a rebuild: the next one hits it
    run.hurry()
    run.finished(3, states=1)


def test_a_stopped_worker_is_left_behind_and_replaced(run: ReplicaRun) -> None:
    run.write(epochs=5, pause_s=0.1)
    run.train(3)
    run.trained(500)
    pid = run.pid(1)
    os.kill(pid, STOP)
    run.pid(1, at_least=2)
    run.hurry()
    run.finished(1, states=2)
    assert not Path(f"/proc/{pid}").exists()


def test_all_are_killed_at_once_and_the_job_begins_again(run: ReplicaRun) -> None:
    run.write(epochs=4)
    run.train(2)
    run.trained(500)
    for pid in (run.pid(0), run.pid(1)):
        os.kill(pid, KILL)
    run.hurry()
    run.finished(2)


def test_master_killed_twice_while_workers_train_on(run: ReplicaRun) -> None:
    run.write(epochs=5)
    run.train(2)
    pid = 0
    for life in (1, 2):
        pid = run.master_pid(other_than=pid)
        run.trained(life * 500)
        os.kill(pid, KILL)
    run.master_pid(other_than=pid)
    assert run.alive(Role.WORKER, 0).incarnation == 1
    run.hurry()
    run.finished(states=2)


def test_worker_and_master_killed_at_once(run: ReplicaRun) -> None:
    run.write(epochs=5)
    run.train(3)
    master = run.master_pid()
    run.trained(500)
    for pid in (master, run.pid(2)):
        os.kill(pid, KILL)
    run.finished(1, states=2)


def test_scaled_from_two_to_three_to_two(run: ReplicaRun) -> None:
    run.write(epochs=7, pause_s=0.1)
    run.train(2)
    run.trained(500)
    scale(run.run_dir, workers=3, ps=None)
    until(lambda: "worker 2 begins" in run.workers_said(), why=run.story)
    run.trained(3500)
    scale(run.run_dir, workers=2, ps=None)
    until(lambda: (m := run.member(Role.WORKER, 2)) is None or m.state != "alive", why=run.story)
    run.hurry()
    run.finished(states=2)
    assert "killed" not in run.text(), run.text()


def test_a_worker_told_to_end_leaves_and_is_replaced(run: ReplicaRun) -> None:
    run.write(epochs=4, pause_s=0.1)
    run.train(2)
    run.trained(500)
    os.kill(run.pid(1), signal.SIGTERM)
    run.pid(1, at_least=2)
    run.entered(1)
    run.hurry()
    run.finished(1, states=2)
    assert "batches retried: 0" in run.text(), run.text()  # it left between two steps


def test_below_min_workers_a_fixed_batch_waits(run: ReplicaRun) -> None:
    run.write(epochs=4)
    run.train(3, "--strategy", "fixed", "--min-workers", "3")
    run.trained(500)
    os.kill(run.pid(1), KILL)
    run.finished(1, states=3)


def test_logical_workers_give_the_same_bits_for_any_number_and_any_loss(tmp_path: Path) -> None:
    sides = {"one": (1, ()), "two": (2, ()), "three": (3, ((150, 0), (400, 1)))}
    digests = {name: logical_run(tmp_path / name, *side, rows=320)[0] for name, side in sides.items()}
    assert len(set(digests.values())) == 1, digests


# ---------------------------------------------------------------- several nodes


def test_a_second_node_joins_trains_and_is_killed_twice(run: ReplicaRun) -> None:
    at = f"127.0.0.1:{free_port()}"
    run.write(epochs=10)
    run.train(1, "--bind", at)  # between the nodes through tunnels
    run.alive(Role.WORKER, 0)
    for life, node in enumerate(("b1", "b2"), 1):
        join(run, at, node)
        run.alive_on(node)
        run.trained(life * 2000)
        run.kill_join(node)
    run.finished(4, states=1)  # each worker, and the next life that its node is asked for until that is lost as well


def test_a_partition_between_two_nodes_is_survived(run: ReplicaRun, networks: Networks) -> None:
    one, two, host, device = networks
    run.write(epochs=10)
    run.train(2, "--bind", f"{host}:7272", "--tls", "control", under=("ip", "netns", "exec", one))
    run.alive(Role.WORKER, 0)
    join(run, f"{host}:7272", "far", under=("ip", "netns", "exec", two))
    run.alive_on("far")
    run.trained(2000)
    subprocess.run(["ip", "-n", one, "link", "set", device, "down"], check=True)
    run.finished(1, states=1)
