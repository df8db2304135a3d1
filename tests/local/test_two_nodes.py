"""A second node joins by TCP: over loopback, and in a network of its own where the machine permits that."""

from __future__ import annotations

import secrets
import signal
from typing import TYPE_CHECKING

import pytest
from node_jobs import Networks, free_port, join

from everstep.cli.status import stop_job
from everstep.model.member import Role

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_a_second_node_joins_trains_and_is_killed_twice(run: Run) -> None:
    at = f"127.0.0.1:{free_port()}"
    run.write(epochs=6, pause_s=0.4)
    run.start("--workers", "1", "--ps", "1", "--bind", at)
    run.alive(Role.WORKER, 0)
    for life, node in enumerate(("b1", "b2"), 1):
        join(run, at, node)
        member = run.alive_on(node)
        run.trained(life * 200)
        run.kill_join(node)
        assert run.leftovers(run.folder / node) == {}
        assert member.role == Role.WORKER
    run.hurry()
    run.ended_well(120)


def test_a_second_node_ends_with_the_job(run: Run) -> None:
    at = f"127.0.0.1:{free_port()}"
    run.write(epochs=100)
    run.start("--workers", "1", "--bind", at)
    run.alive(Role.WORKER, 0)
    run_dir = join(run, at, "b")
    run.alive_on("b")
    run.trained(2500)
    code, out = run.everstep("status", str(run_dir))  # asks the master over TCP
    assert code == 0 and "worker:1" in out and " b " in out, out
    stop_job(run.run_dir)
    assert run.wait() == 0, run.story()
    assert run.wait_join("b") == 0, run.story()
    assert run.leftovers(run_dir) == {}
    run.check_audit()


def test_a_second_node_that_is_told_to_leave_gives_back_and_goes(run: Run) -> None:
    run.write(epochs=6)
    run.start("--workers", "1", "--bind", "127.0.0.1:0")  # any free port; the first lines say which
    run.alive(Role.WORKER, 0)
    at = run.text().partition("--join ")[2].split()[0]
    run_dir = join(run, at, "b")
    run.alive_on("b")
    run.trained(200)
    run.joined["b"].send_signal(signal.SIGTERM)
    assert run.wait_join("b") == 143, run.join_text("b")
    assert run.leftovers(run_dir) == {}
    run.hurry()
    run.ended_well()


def test_a_wrong_secret_is_one_line_and_disturbs_nobody(run: Run) -> None:
    import msgspec

    from everstep.net.auth import create_secret

    at = f"127.0.0.1:{free_port()}"
    run.start("--workers", "1", "--bind", at)
    run.alive(Role.WORKER, 0)
    wrong = run.folder / "wrong"
    create_secret(wrong)
    own = msgspec.json.decode((run.run_dir / "secret").read_bytes(), type=dict[str, str])
    own["secret"] = secrets.token_hex(32)  # right certificate, wrong secret
    half = run.folder / "half"
    half.write_bytes(msgspec.json.encode(own))
    half.chmod(0o600)
    for node, secret in (("b1", wrong), ("b2", half)):
        join(run, at, node, secret=secret)
        assert run.wait_join(node) in (2, 4)
        text = run.join_text(node)
        assert text.startswith("everstep: ") and text.count("\n") == 1 and "secret" in text, text
    run.hurry()
    run.ended_well()


def test_a_node_in_another_network_joins_and_is_killed(run: Run, networks: Networks) -> None:
    one, two, host, _ = networks
    at = f"{host}:7171"
    run.write(epochs=6, pause_s=0.4)
    run.start("--workers", "1", "--ps", "2", "--bind", at, under=("ip", "netns", "exec", one))
    run.alive(Role.WORKER, 0)
    for life, node in enumerate(("far1", "far2"), 1):
        join(run, at, node, under=("ip", "netns", "exec", two))
        run.alive_on(node)
        run.trained(life * 200)
        run.kill_join(node)
        assert run.leftovers(run.folder / node) == {}
    run.hurry()
    run.ended_well(120)
