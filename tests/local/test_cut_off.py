"""A node that is cut off from the master: what runs on it ends by itself; its agent comes back, or goes away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from local_jobs import until
from node_jobs import free_port, join
from proxy import Proxy

from everstep.model.member import Role

if TYPE_CHECKING:
    from local_jobs import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def at() -> int:
    return free_port()


@pytest.fixture
def proxy(at: int) -> Iterator[Proxy]:
    made = Proxy(at)
    yield made
    made.close()


def begin(run: Run, at: int, settings: str) -> None:
    config = run.folder / "job.yaml"
    config.write_text(f"lost_after_s: 4\nsuspect_after_s: 2\n{settings}")
    run.start("-c", str(config), "--workers", "1", "--bind", f"127.0.0.1:{at}")
    run.alive(Role.WORKER, 0)


def actions(run: Run, member: str) -> list[str]:
    lines = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    return [line["action"] for line in lines if line["member"] == member]


def test_a_node_that_is_cut_off_ends_its_processes_and_comes_back(run: Run, at: int, proxy: Proxy) -> None:
    run.write(epochs=30, pause_s=0.3)
    begin(run, at, "cut_off_s: 8\nrejoin_s: 200\n")
    join(run, f"127.0.0.1:{proxy.port}", "b")
    first = run.alive_on("b")
    run.trained(200)
    proxy.cut()
    until(lambda: run.gone(first.pid), why=lambda: run.join_text("b"))  # by itself
    assert run.joined["b"].poll() is None
    assert "this node counts as lost" in run.join_text("b")
    until(lambda: "node lost" in actions(run, "b"), why=run.story)
    proxy.mend()
    again = run.alive_on("b")
    assert again.incarnation > first.incarnation
    until(lambda: "this node is back" in run.join_text("b"), why=lambda: run.join_text("b"))
    assert "node back" in actions(run, "b")
    run.hurry()
    run.ended_well()
    assert run.wait_join("b") == 0, run.join_text("b")


def test_a_node_that_is_cut_off_while_the_job_ends_goes_away_in_one_line(run: Run, at: int, proxy: Proxy) -> None:
    run.write(epochs=30, pause_s=0.3)
    begin(run, at, "cut_off_s: 5\nrejoin_s: 6\n")
    run_dir = join(run, f"127.0.0.1:{proxy.port}", "b")
    run.alive_on("b")
    run.trained(200)
    proxy.cut()
    run.hurry()
    run.ended_well()
    assert run.wait_join("b") == 4, run.join_text("b")
    last = run.join_text("b").strip().splitlines()[-1]
    assert last.startswith("everstep: the master could not be reached for"), last
    assert run.leftovers(run_dir) == {}


def test_a_node_finds_nobody_where_the_master_was(run: Run, at: int) -> None:
    """The job ended while the node was cut off, and then the network is back: it need not try for long."""
    proxy = Proxy(at)
    run.write(epochs=30, pause_s=0.3)
    begin(run, at, "cut_off_s: 5\nrejoin_s: 86400\n")
    join(run, f"127.0.0.1:{proxy.port}", "b")
    run.alive_on("b")
    proxy.cut()
    run.hurry()
    run.ended_well()
    proxy.close()
    assert run.wait_join("b", 120.0) == 4, run.join_text("b")
    assert "nobody listens any more where the master was" in run.join_text("b").strip().splitlines()[-1]
