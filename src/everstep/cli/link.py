"""Reaches the master, for commands and agents."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from everstep.agent.agent import BEAT_S, Agent
from everstep.errors import PlatformError
from everstep.ids import Incarnation, NodeId
from everstep.model.job_view import JobView
from everstep.model.member import Address
from everstep.net.auth import Identity, Secret, load_secret
from everstep.net.control import ControlClient
from everstep.net.messages import Answered, GetStatus, RequestType, SpecReport
from everstep.net.rendezvous import SECRET_FILE, MasterInfo, master_address, write_master
from everstep.net.shown import shown
from everstep.net.sockets import parse_host_port

ANSWER_S = 10.0

# A command says what went wrong once, through its own error; the log lines of its connection would double it.
logging.getLogger("everstep").addHandler(logging.NullHandler())


def connect_agent(agent: Agent, address: Callable[[], Address | None], secret: Secret) -> ControlClient:
    """Return the agent's lasting connection."""
    return ControlClient(
        address=address,
        run_dir=agent.run_dir,
        secret=secret,
        identity=Identity(purpose="control", role="agent", node=agent.node, pid=os.getpid()),
        hello=agent.hello,
        on_order=agent.on_order,
        on_fenced=lambda answer: agent.on_fenced(answer.reason),
        beat=agent.beat,
        beat_s=BEAT_S,
    )


def ask(
    address: Callable[[], Address | None], run_dir: Path | None, secret: Secret, request: RequestType, timeout_s: float
) -> Answered:
    """Ask one question, on a connection of its own. Raises DeadlineError, SecretError, VersionError."""
    node = NodeId("node0") if run_dir is not None else NodeId("")
    identity = Identity(purpose="control", role="command", node=node, pid=os.getpid())
    with ControlClient(address=address, run_dir=run_dir, secret=secret, identity=identity) as client:
        answer = client.call(request, timeout_s)
    # Names and errors in it come from others. (A spec is used, not shown: its script may be called anything.)
    return answer if isinstance(answer, SpecReport) else shown(answer)


def ask_master(run_dir: Path, request: RequestType, timeout_s: float = ANSWER_S) -> Answered:
    """Ask the master of a run, here or (in the run directory of a joined node) elsewhere."""
    secret = load_secret(run_dir / SECRET_FILE)
    return ask(lambda: master_address(run_dir), run_dir, secret, request, timeout_s)


def ask_view(run_dir: Path, *, speed: bool = False, graph: bool = False, timeout_s: float = ANSWER_S) -> JobView:
    """Return the read model of a running job. ``speed``: also how fast its members are; ``graph``: also the model and
    the tables. Raises as ``ask_master``."""
    view = ask_master(run_dir, GetStatus(speed, graph), timeout_s)
    assert isinstance(view, JobView)
    return view


def ask_address(address: Address, secret: Secret, request: RequestType, timeout_s: float) -> Answered:
    """Ask a master elsewhere."""
    return ask(lambda: address, None, secret, request, timeout_s)


def write_remote_master(run_dir: Path, address: Address) -> None:
    """Write down where the master is, so that workers of a joined node find it in their own run directory."""
    info = MasterInfo(
        pid=0, incarnation=Incarnation(0), node=address.node, unix="", host=address.host, port=address.port
    )
    write_master(run_dir, info)


def reachable_host(bind: str) -> str:
    """Return where other nodes find a job bound to ``bind``: its host, or for "all addresses" the one of the default
    route."""
    if not bind:
        return ""
    host, port = parse_host_port(bind)
    if host not in ("0.0.0.0", "::", "*"):
        return host
    try:
        return own_host("192.0.2.1" if host != "::" else "2001:db8::1", port or 1)  # documentation addresses
    except OSError:
        raise PlatformError(f"--bind {bind}: this machine has no route to others; name the address to use") from None


def own_host(host: str, port: int) -> str:
    """Return this machine's address on the way to ``host`` (nothing is sent)."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
