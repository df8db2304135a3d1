"""``everstep agent --join``: this machine joins a running job."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from everstep.agent.agent import RECLAIM_S, Agent
from everstep.agent.rundir import RunDirLock, disk_error, remove_sockets
from everstep.bounds import PLACES_MAX
from everstep.config.capacity import check_zone
from everstep.config.load import check_script, new_run_dir, save_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError, PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import RETURNS_A_LIFE, Market
from everstep.model.member import Address
from everstep.model.notice import Notice
from everstep.net.auth import Identity, Secret, load_secret
from everstep.net.messages import GetSpec, SpecReport
from everstep.net.sockets import parse_host_port
from everstep.platforms.notices import NoticeWatch, sources_of
from everstep.protect.home_files import LogSender, link_home

JOIN_S = 30.0
_LOOK_S = 1.0
_ASK_S = 15.0


def join_job(
    master: str,
    secret_file: Path,
    workers: int,
    run_dir: Path | None,
    node: str,
    hardware: str = "",
    notices: str | None = None,
    zone: str = "",
    market: str = "",
    life: int = 0,
    ps: int | None = None,
    machine: str = "",
    host: str = "",
    join_s: float = JOIN_S,
    reclaim_s: float | None = None,
    keep_logs: bool = False,
) -> int:
    """Run this machine's agent until the job ends or the agent is stopped; return the exit code. ``notices``: as in
    ``--notices``; None: as the job says. ``zone``, ``market``: of this machine, "": not said. ``life``: so many
    machines of this name came before. ``ps``: that this node takes, None: see
    ``ps_offered``. ``machine``: as which
    this one counts, "": found out. ``host``: address of this node, "": on the way to the master. ``join_s``: so long
    the master may not be there yet. ``reclaim_s``: see ``Agent``. ``keep_logs``: the logs of this node's processes
    go to the first node when they have ended."""
    from everstep.cli.link import ask_address, connect_agent, own_host, write_remote_master

    if not (0 if ps else 1) <= workers <= PLACES_MAX:
        raise ConfigError(f"--workers {workers}: must be from 1 to {PLACES_MAX:,}")
    sources_of(notices or "")
    if ps is not None and not 0 <= ps <= PLACES_MAX:
        raise ConfigError(f"--ps {ps}: must be from 0 to {PLACES_MAX:,}")
    check_zone(zone, f"--zone {zone!r}")
    check_zone(machine, f"--machine {machine!r}")
    master_host, port = parse_host_port(master)
    secret = load_secret(secret_file)
    address = Address(NodeId("node0"), "", master_host, port)
    name = NodeId(node or f"{socket.gethostname()}-{secrets.token_hex(2)}")
    report = ask_address(address, secret, GetSpec(), timeout_s=join_s)
    if not isinstance(report, SpecReport):
        raise PlatformError(f"the master at {master} did not tell its job: {report}")
    spec = report.spec
    if not workers and not spec.master_alone:
        raise ConfigError("--workers 0: a node without workers needs a job with master_alone: true")
    check_script(spec.script)
    here = run_dir or new_run_dir(f"{spec.name}-{name}")
    with RunDirLock.take(here):
        if (here / "job.json").exists():
            raise ConfigError(f"run directory {here}: has been used; choose another --run-dir or remove this one")
        remove_sockets(here)
        try:
            shutil.copyfile(secret_file, here / "secret.part")
            (here / "secret.part").chmod(0o600)
            (here / "secret.part").replace(here / "secret")
            save_spec(here, spec, {})
            write_remote_master(here, address)
        except OSError as error:
            raise disk_error(here, error) from None
        print(
            f"everstep: {name} joins {spec.name} at {master} with {workers} workers, run directory {here}", flush=True
        )
        identity = Identity(purpose="data", role="agent", node=name, pid=os.getpid())
        link = link_home(spec, address, secret, identity)
        logs = (
            LogSender(here / "audit", name, link, keeps=here / "logs" if keep_logs else None)
            if link is not None
            else None
        )
        if logs is not None:
            logs.start()
        wrong: Notice | None = None
        for returns in itertools.count(life * RETURNS_A_LIFE):
            agent = Agent(
                spec,
                here,
                name,
                lambda a: connect_agent(a, lambda: address, secret),
                _say,
                keeps_master=False,
                host=host or own_host(master_host, port),
                worker_places=workers,
                ps_places=ps_offered(spec, market) if ps is None else ps,
                hardware=hardware,
                notices=sources_of(spec.notices if notices is None else notices),
                returns=returns,
                zone=zone,
                market=Market(market) if market else None,
                machine=machine,
                reclaim_s=RECLAIM_S if reclaim_s is None else reclaim_s,
                known=wrong,
            )
            outcome = agent.run()
            if agent.emptied_for is None or not outcome.exit_code:
                break
            if not _stays(agent, lambda: _job_is_on(address, secret), spec.still_here_s):
                break
            wrong = agent.emptied_for
            _say(f"{name} is still here: it joins {spec.name} again")
        if logs is not None:
            logs.close()
    if outcome.exit_code:
        sys.stderr.write(f"{outcome.detail}everstep: {outcome.error}; run directory {here}\n")
    return outcome.exit_code


def ps_offered(spec: JobSpec, market: str) -> int:
    """Return how many ps a node takes where nobody said: any number if the job expects nodes or protects its ps; none
    on a machine that may be taken back."""
    wanted = spec.nodes > 1 or spec.parity not in ("", "0") or "ps" in spec.reliable
    return PLACES_MAX if wanted and market != Market.SPOT else 0


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _stays(agent: Agent, job_is_on: Callable[[], bool], still_here_s: float) -> bool:
    """This node was emptied, and its machine is still here: wait whether it stays, at most until ``still_here_s`` after
    the moment that its notice said. False: the job is over."""
    notice = agent.emptied_for
    assert notice is not None
    _say(f"{agent.node} is empty, and waits for its end; should it stay, it joins again (Ctrl-C ends it)")
    since = time.time() if notice.at is None else max(time.time(), notice.at)
    watch = NoticeWatch(agent.notices.sources, lambda _: None, _say)
    watch.start()
    try:
        asked = time.monotonic()
        while time.time() < since + still_here_s and not (watch.asked_all() and not watch.certain()):
            time.sleep(_LOOK_S)
            if time.monotonic() > asked + _ASK_S:
                asked = time.monotonic()
                if not job_is_on():
                    return False
        return job_is_on()
    finally:
        watch.close()


def _job_is_on(address: Address, secret: Secret) -> bool:
    from everstep.cli.link import ask_address

    try:
        return isinstance(ask_address(address, secret, GetSpec(), timeout_s=JOIN_S), SpecReport)
    except EverstepError:
        return False
