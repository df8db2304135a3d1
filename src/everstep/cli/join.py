"""``everstep agent --join``: this machine joins a running job."""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
import time
from pathlib import Path

from everstep.agent.agent import Agent
from everstep.agent.rundir import RunDirLock, disk_error, remove_sockets
from everstep.bounds import PLACES_MAX
from everstep.config.load import check_script, new_run_dir, save_spec
from everstep.errors import ConfigError, PlatformError
from everstep.ids import NodeId
from everstep.model.member import Address
from everstep.net.auth import load_secret
from everstep.net.messages import GetSpec, SpecReport
from everstep.net.sockets import parse_host_port

JOIN_S = 30.0


def join_job(master: str, secret_file: Path, workers: int, run_dir: Path | None, node: str, hardware: str = "") -> int:
    """Until the job ends or this agent is stopped; the exit code."""
    from everstep.cli.link import ask_address, connect_agent, own_host, write_remote_master

    if not 1 <= workers <= PLACES_MAX:
        raise ConfigError(f"--workers {workers}: must be from 1 to {PLACES_MAX:,}")
    host, port = parse_host_port(master)
    secret = load_secret(secret_file)
    address = Address(NodeId("node0"), "", host, port)
    name = NodeId(node or f"{socket.gethostname()}-{secrets.token_hex(2)}")
    report = ask_address(address, secret, GetSpec(), timeout_s=JOIN_S)
    if not isinstance(report, SpecReport):
        raise PlatformError(f"the master at {master} did not tell its job: {report}")
    spec = report.spec
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
        agent = Agent(
            spec,
            here,
            name,
            lambda a: connect_agent(a, lambda: address, secret),
            lambda text: print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True),
            keeps_master=False,
            host=own_host(host, port),
            worker_places=workers,
            hardware=hardware,
        )
        print(
            f"everstep: {name} joins {spec.name} at {master} with {workers} workers, run directory {here}", flush=True
        )
        outcome = agent.run()
    if outcome.exit_code:
        sys.stderr.write(f"{outcome.detail}everstep: {outcome.error}; run directory {here}\n")
    return outcome.exit_code
