"""Attacks on a job that runs: it trains on, ends well, and every sample counts once."""

from __future__ import annotations

import socket
import threading
import urllib.request
from typing import Any

import pytest
from local_jobs import Run
from node_jobs import free_port, join

from everstep.brain.events import NodeJoined, ProcessExited, Refused, ScaleAsked, ShardDone, SnapshotsWritten, StopAsked
from everstep.errors import EverstepError
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.member import Address, Role
from everstep.net import messages as wire
from everstep.net.auth import Identity, load_secret
from everstep.net.control import ControlClient
from everstep.net.rendezvous import SECRET_FILE, master_address

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

ANSWER_S = 60.0


def said(run: Run, port: int, role: Any, request: wire.RequestType, life: int) -> Any:
    """The answer to a request over a connection of this role, an agent's being of another node; an error of the
    connection where there is none."""
    node, life = (NodeId("n9"), 0) if role == "agent" else (NodeId("node0"), life)
    who = Identity(purpose="control", role=role, incarnation=Incarnation(life), node=node)
    far = Address(NodeId("node0"), "", "127.0.0.1", port)
    secret = load_secret(run.run_dir / SECRET_FILE)
    client = ControlClient(
        address=lambda: far if node == "n9" else master_address(run.run_dir),
        run_dir=run.run_dir,
        secret=secret,
        identity=who,
    )
    try:
        # (one that the master's decoder refuses ends the connection, and is sent again until its time is over)
        return client.call(request, 3.0 if _wrong(request) else ANSWER_S)
    except EverstepError as error:
        return error
    finally:
        client.close()


def _wrong(request: wire.RequestType) -> bool:
    """Whether the decoder refuses it."""
    import msgspec

    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire.Call(1, request)), type=wire.Call)
    except msgspec.MsgspecError:
        return True
    return False


def test_a_member_that_lies_changes_nothing(run: Run) -> None:
    port = free_port()
    run.write(epochs=25, pause_s=0.5)
    run.start("--workers", "2", "--ps", "1", "--checkpoint-every", "20batches", "--bind", f"127.0.0.1:{port}")
    master = run.master_pid()
    life = run.alive(Role.WORKER, 0).incarnation
    run.alive(Role.WORKER, 1)
    run.trained(300)
    huge = NodeJoined(NodeId("n9"), "", 300_000_000, 0, ())
    lies: list[tuple[Any, wire.RequestType]] = [
        ("agent", huge),
        ("worker", SnapshotsWritten(1)),
        ("worker", ScaleAsked(Role.WORKER, 500)),
        ("worker", ProcessExited(Role.WORKER, Slot(1), Incarnation(1), 0)),
        ("worker", StopAsked("because", False)),
        ("worker", ShardDone(ShardKey(-(2**63)), LeaseNo(1), ())),
        ("worker", ShardDone(ShardKey(1 << 40), LeaseNo(1), ())),
        ("ps", ShardDone(ShardKey(0), LeaseNo(1), ())),
        ("agent", ProcessExited(Role.WORKER, Slot(0), Incarnation(1), -9)),
    ]
    for role, lie in lies:
        answer = said(run, port, role, lie, life if role == "worker" else 1)
        kind = EverstepError if _wrong(lie) else Refused
        assert isinstance(answer, kind), f"{lie} of a {role}: {answer}"
    secret = ("--secret-file", str(run.run_dir / "secret"))
    code, out = run.everstep("agent", "--join", "127.0.0.1:1", *secret, "--workers", "300000000")
    assert code == 2 and out.count("\n") == 1 and "300000000" in out, out
    assert run.master_pid() == master, "the master was replaced"
    status = run.status()
    assert status is None or len(status.members) == 4, "the master, two workers, a ps"
    run.hurry()
    run.ended_well()


def test_silent_connections_keep_no_node_and_no_scrape_out(run: Run) -> None:
    port, metrics = free_port(), free_port()
    run.write(epochs=25, pause_s=0.5)
    run.start("--workers", "1", "--ps", "1", "--bind", f"127.0.0.1:{port}", "--metrics", f"127.0.0.1:{metrics}")
    run.alive(Role.WORKER, 0)
    over = threading.Event()

    def silent(at: int, most: int) -> None:
        """``most`` connections that say nothing, and come again when they are cut."""
        held: list[socket.socket] = []
        while not over.is_set():
            for sock in [s for s in held if _cut(s)]:
                held.remove(sock)
                sock.close()
            while len(held) < most and not over.is_set():
                try:
                    held.append(socket.create_connection(("127.0.0.1", at), 5.0))
                    held[-1].setblocking(False)
                except OSError:
                    break
            over.wait(0.2)
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=silent, args=args) for args in ((port, 600), (metrics, 40))]
    for thread in threads:
        thread.start()
    try:
        run.trained(run.samples() + 300)
        join(run, f"127.0.0.1:{port}", "b")
        run.alive_on("b")
        run.trained(run.samples() + 300)
        for _ in range(10):
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=ANSWER_S) as page:
                assert b"everstep_samples_total" in page.read()
        run.hurry()
        assert run.wait() == 0, run.story()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    run.check_audit()


def _cut(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
