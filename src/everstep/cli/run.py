"""Runs ``everstep run``."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from everstep import faultpoints
from everstep.agent.agent import Agent, JobOutcome
from everstep.agent.rundir import FOLDERS, RunDirLock, disk_error, remove_sockets
from everstep.cli.capacity import make_fleet
from everstep.cli.cluster_platform import has_begun, of_cluster, on_cluster, run_again
from everstep.cli.display import Display, make_screen, read_summary, summary_lines
from everstep.cli.model import leave_model
from everstep.cli.remembered_job import SeenJob, remember_job
from everstep.cli.suspend import go_on, keep_elsewhere, take_here, wait_for_capacity
from everstep.config.capacity import parse_capacity
from everstep.config.load import check_policy_module, check_script, load_spec, new_run_dir, read_spec, save_spec
from everstep.config.parity import parse_code
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError, StorageError
from everstep.model.capacity import Market, Offer, offer_words
from everstep.model.job_view import JobView
from everstep.net.messages import GetStatus
from everstep.net.sockets import listen_tcp, parse_host_port
from everstep.platforms.capacity import JoinedHosts, first_machine
from everstep.platforms.fleet_runner import FleetRunner
from everstep.platforms.notices import sources_of
from everstep.platforms.trace_capacity import read_trace
from everstep.policies.dense_part import dense_words
from everstep.protect.model import IN_RUN_DIR

if TYPE_CHECKING:
    from everstep.protect.home_files import HomeFiles

LEFT = (  # by a run in which nothing was started
    "job.json",
    "secret",
    "master.json",
    "journal.sqlite",
    "journal.sqlite-wal",
    "journal.sqlite-shm",
    "events.jsonl",
    "metrics.jsonl",
    "members.jsonl",
    "metrics.token",
    "summary.json",
    "resume.json",
)
SUSPENDED = 7  # exit code of a job that is suspended
STATUS_S = 1.0  # a display waits no longer for the master
LOGS_S = 20.0  # nodes that are there send the last of their audit logs within that


def run_job(config: Path | None, flags: Mapping[str, Any], live: bool) -> int:
    """Run a job on this machine until its end; the exit code of ``everstep``."""
    faultpoints.planted()  # a wrong one is refused before anything starts
    spec, origins = load_spec(config, dict(flags), os.environ, sizes=_sizes)
    script = check_script(spec.script)
    if parse_capacity(spec.capacity).kind == "trace":
        spec = traced(spec)
    if of_cluster(spec):
        spec = on_cluster(spec)
    if spec.nodes > 1 and not spec.bind:
        spec = msgspec.structs.replace(spec, bind="0.0.0.0:0")
    spec = priced(spec)
    check_policy_module(spec.policy, script.parent)
    check_policy_module(spec.spot_policy, script.parent, "spot_policy")
    name = spec.name if origins.get("name") != "default" else job_name(script)
    to = absolute(spec.checkpoint_to) if spec.checkpoint_to else ""
    spec = msgspec.structs.replace(
        spec, script=str(script), name=name, bind=absolute_endpoint(spec.bind), checkpoint_to=to
    )
    spec = msgspec.structs.replace(
        spec, metrics=absolute_endpoint(spec.metrics, tried=False), model_to=model_place(spec.model_to)
    )
    refuse_foreign(spec.checkpoint_to)
    spec = msgspec.structs.replace(spec, cold_dir=cold_place(spec.cold_dir))
    run_dir = Path(absolute(spec.run_dir)) if spec.run_dir else new_run_dir(spec.name)
    with RunDirLock.take(run_dir):
        if of_cluster(spec) and has_begun(run_dir):
            return run_again(spec, run_dir, live, os.environ)
        refuse_used(run_dir)
        return run_here(spec, origins, run_dir, live)


def _sizes(values: dict[str, Any]) -> dict[str, Any]:
    """Return a job's settings with a number for each ``auto``, and say what it begins with."""
    from everstep.cli.auto_size import with_sizes

    found, note = with_sizes(values)
    print(f"everstep: {note}", flush=True)
    return found


def traced(spec: JobSpec) -> JobSpec:
    """Return the spec of a job whose machines come from a recording: the file can be read, and the agents, which are
    processes of this machine, can join. Raise ConfigError."""
    path = Path(absolute(parse_capacity(spec.capacity).rest))
    read_trace(path)
    return msgspec.structs.replace(spec, capacity=f"trace:{path}", bind=spec.bind or "127.0.0.1:0")


def priced(spec: JobSpec) -> JobSpec:
    """Return the spec with the place of its prices, which can be read. Say so if the budget is small, or the first
    machine has no price. Raise ConfigError."""
    if not spec.prices:
        return spec
    from everstep.monitor.price_files import read_prices

    path = absolute(spec.prices)
    usd, _ = read_prices(Path(path)).price(spec.hardware, spec.zone, Market(spec.market), time.time())
    kind = offer_words(Offer(spec.hardware, spec.zone, Market(spec.market)))
    if usd is None and spec.hardware:  # (else its class is found out, and its price with it)
        print(f"everstep: prices {path!r} has none for the first machine ({kind}): what it costs is not counted")
    elif usd is not None and 0 < spec.budget < usd:
        words = f"budget = {spec.budget:g} USD: less than one hour of the first machine ({kind}, {usd:g} USD/h)"
        print(f"everstep: {words}: the job is suspended within {3600 * spec.budget / usd:.0f} s")
    return msgspec.structs.replace(spec, prices=path)


def absolute(url: str) -> str:
    """Return a path that stays the same wherever a process of the job runs; URLs as they are."""
    return url if "://" in url else os.path.normpath(Path(url).absolute())


def cold_place(folder: str) -> str:
    """Return the absolute path of ``cold_dir``; "": there is none. Raises ConfigError: it takes no file here."""
    if not folder:
        return ""
    path = Path(folder).expanduser().absolute()
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"0")
    except OSError as error:
        raise ConfigError(
            f"cold_dir = {folder!r}: {error.strerror}: give a directory that exists and takes files"
        ) from None
    return str(path)


def model_place(url: str) -> str:
    """Return the place as it is in job.json: ``none``, ``run_dir``, or a place that stays the same wherever a process
    runs."""
    return url if url in ("none", IN_RUN_DIR) else absolute(url) if url else IN_RUN_DIR


def absolute_endpoint(bind: str, tried: bool = True) -> str:
    """Return the address with its port: ``--bind HOST:0`` takes a free one now, so that every later master of the job
    listens on the same one. ``tried``: an address that cannot be had is an error (PlatformError)."""
    if not bind:
        return bind
    host, port = parse_host_port(bind)
    if port and not tried:
        return bind
    with contextlib.closing(listen_tcp(host, port)) as probe:
        if port:
            return bind
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_beside(bind: str, port: int) -> socket.socket:
    """Listen at another port of the same host. ``port`` 0: any that is free, but for the one of ``bind``, which the
    master is to have. Raise PlatformError."""
    host, taken = parse_host_port(bind)
    listener = listen_tcp(host, port)
    if port or listener.getsockname()[1] != taken:
        return listener
    with contextlib.closing(listener):
        return listen_tcp(host, 0)


def job_name(script: Path) -> str:
    """A job without a name of its own has its script's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", script.stem).strip("-._")[:60] or "job"


def refuse_used(run_dir: Path) -> None:
    """Raises ConfigError if a job has been here: its parameters are gone, so it cannot go on. What a run left that
    started nothing (its address was in use, say) is removed. With the run directory locked."""
    if (run_dir / "job.json").exists() and not ran(run_dir):
        for name in LEFT:
            (run_dir / name).unlink(missing_ok=True)
    if (run_dir / "job.json").exists():
        read_spec(run_dir)  # another version says so itself
        raise ConfigError(
            f"run directory {run_dir}: holds a job that has ended; choose another --run-dir or remove this one"
        )


def ran(run_dir: Path) -> bool:
    """Whether a worker or a ps was ever started here, or something of a job is here that we do not know."""
    known = {*LEFT, *FOLDERS, "lock"}
    started = ("worker-", "ps-")
    here = [entry.name for entry in run_dir.iterdir()]
    logs = [entry.name for entry in (run_dir / "logs").iterdir()] if "logs" in here else []
    audit = "audit" in here and any((run_dir / "audit").iterdir())
    return audit or not known.issuperset(here) or any(name.startswith(started) for name in logs)


def refuse_foreign(url: str) -> None:
    """Raises ConfigError if another job's checkpoints are in this place: their numbers would be used again. A place
    that cannot be reached now is nothing to wait for."""
    if not url:
        return
    from everstep.protect.manifest import list_checkpoints
    from everstep.storage.places import open_place

    with contextlib.suppress(StorageError):
        if found := list_checkpoints(open_place(url)):
            raise ConfigError(
                f"checkpoint_to = {url!r}: has checkpoints of another job (up to {found[-1]}); go on from them with "
                f"everstep resume {url}, or name another place"
            )


def run_here(spec: JobSpec, origins: dict[str, str], run_dir: Path, live: bool, lineage: bytes = b"") -> int:
    """Run this job in a locked run directory until its end. ``lineage``: see ``create_secret``."""
    remove_sockets(run_dir)
    return _run(spec, origins, run_dir, live, lineage)


def _run(spec: JobSpec, origins: dict[str, str], run_dir: Path, live: bool, lineage: bytes = b"") -> int:
    from everstep.net.auth import create_secret

    spec, files = home_files(spec, run_dir)

    def prepare() -> None:
        try:
            create_secret(run_dir / "secret", lineage)
            save_spec(run_dir, spec, origins)
        except OSError as error:
            raise disk_error(run_dir, error) from None

    return run_terms(spec, run_dir, live, prepare, files)


def home_files(spec: JobSpec, run_dir: Path) -> tuple[JobSpec, HomeFiles | None]:
    """Return the spec with the port at which this node serves files to others, and what serves them; None: there are
    no other nodes."""
    from everstep.protect.home_files import NODE_LOGS, HomeFiles, served_places

    if not spec.bind:
        return spec, None
    listener = listen_beside(spec.bind, spec.files_port)
    spec = msgspec.structs.replace(spec, files_port=listener.getsockname()[1])
    places = {**served_places(spec, run_dir), NODE_LOGS: run_dir / "nodes"}
    return spec, HomeFiles(places, run_dir / "audit", listener)


def run_terms(
    spec: JobSpec, run_dir: Path, live: bool, prepare: Callable[[], None], files: HomeFiles | None = None
) -> int:
    """Run a job until its end, or until it is suspended by hand. If it suspends itself, and its machines come from a
    source, wait for capacity and go on. ``prepare``: called by the first agent, before its master starts. ``files``:
    for other nodes."""
    from everstep.net.auth import load_secret

    run = _Run(spec, run_dir, live)

    def begin() -> None:
        prepare()
        if files is not None:
            files.serve(load_secret(run_dir / "secret"), spec.tls == "all")

    first: Callable[[], None] = begin
    fleet: FleetRunner | None = None
    began = time.monotonic()
    try:
        while True:
            agent = run.agent(first)
            if fleet is None:
                fleet = make_fleet(spec, run_dir, agent.host, run.fetch, run.say)
            run.display.start()
            if fleet is not None:
                fleet.start()
            try:
                outcome = agent.run()
                if files is not None and (missing := files.wait(agent.within(LOGS_S))):
                    silent = f"these nodes were not heard for {LOGS_S:g} s"
                    run.say(f"audit logs of {', '.join(missing)} are not all here: {silent}")
            finally:
                if fleet is not None:
                    fleet.pause()
                run.display.stop()
            summary = read_summary(run_dir)
            if summary is not None and summary.is_suspended:
                keep_elsewhere(spec, run_dir, summary)
            suspended = outcome.exit_code == 0 and summary is not None and summary.is_suspended
            if not suspended or summary is None or not summary.by_itself or fleet is None:
                break
            print("\n".join(summary_lines(summary, run_dir)), flush=True)
            why = wait_for_capacity(spec, run_dir, summary.suspensions, fleet)
            take_here(spec, run_dir, summary.suspensions)
            go_on(run_dir, summary.suspensions, why)
            first = _nothing
    finally:
        if fleet is not None:
            fleet.close()
        if files is not None:
            files.close()
    outcome, lines = leave_model(spec, run_dir, outcome)
    if note := remember_job(spec, run_dir, run.seen):
        lines = [*lines, note]
    code = conclude(outcome, run_dir, time.monotonic() - began, lines)
    return SUSPENDED if suspended else code


def _nothing() -> None:
    """All is there already."""


class _Run:
    """Holds the agent and the display of the present term of a job, for those who outlive it."""

    def __init__(self, spec: JobSpec, run_dir: Path, live: bool) -> None:
        self._spec, self._run_dir, self._live = spec, run_dir, live
        self._agent: Agent | None = None
        self._warned = False
        self.seen = SeenJob()
        self.display = self._make_display()

    def _make_display(self) -> Display:
        return Display(self._run_dir, self.fetch, lambda: make_screen(self._live))

    def fetch(self) -> JobView | None:
        """Return what the master shows of the job; None: it does not answer."""
        agent = self._agent
        if agent is None or agent.client is None:
            return None
        try:
            answer = agent.client.call(GetStatus(), timeout_s=STATUS_S)
        except EverstepError:
            return None
        if not isinstance(answer, JobView):
            return None
        self.seen.see(answer)
        return answer

    def say(self, text: str) -> None:
        """Tell people a line."""
        self.display.say(text)

    def agent(self, prepare: Callable[[], None]) -> Agent:
        """Return the agent of the next term."""
        from everstep.cli.link import connect_agent, reachable_host
        from everstep.net.auth import load_secret
        from everstep.net.rendezvous import master_address

        spec, run_dir = self._spec, self._run_dir
        if self._agent is not None:
            self._agent, self.display = None, self._make_display()
        machine = first_machine(spec.hardware, spec.zone, Market(spec.market))
        agent = self._agent = Agent(
            spec,
            run_dir,
            machine.node,
            lambda a: connect_agent(a, lambda: master_address(run_dir), load_secret(run_dir / "secret")),
            self.say,
            keeps_master=True,
            host=reachable_host(spec.bind),
            prepare=prepare,
            hardware=machine.offer.hardware,
            zone=machine.offer.zone,
            market=machine.offer.market,
            notices=sources_of(spec.notices),
            suspends=spec.capacity == "slurm" and "SLURM_JOB_ID" in os.environ,
        )
        if not self._warned:
            self._warned = True
            self._tell(agent.host)
        return agent

    def _tell(self, host: str) -> None:
        spec, run_dir = self._spec, self._run_dir
        servers = f"{spec.ps} ps" if spec.ps else ""
        if spec.grouped:
            stages = f"mode {spec.mode}" + (f" in {spec.stages} stages" if spec.mode == "pipeline" else "")
            servers = f"{stages}, {servers}" if servers else stages
        if spec.consistency != "async":
            servers += f", {spec.consistency}"
        sys.stdout.write(f"everstep: {spec.name}: {spec.workers} workers, {servers}, run directory {run_dir}\n")
        if dense := dense_words(spec.grouped, spec.protect == "lag", parse_code(spec.parity).m if spec.ps else 0):
            sys.stdout.write(f"parity {spec.parity}: {dense}\n")
        if of_cluster(spec):
            each = f"{spec.capacity_workers} workers, {spec.capacity_ps} ps"
            print(f"everstep: {spec.capacity_nodes} nodes of {spec.capacity}, at most {each} on each", flush=True)
        elif spec.bind:
            port = parse_host_port(spec.bind)[1]
            at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            JoinedHosts(at, f"{run_dir}/secret", lambda text: print(text)).request(1)
        if spec.bind and spec.grouped and spec.tls == "control":
            sys.stdout.write(
                "tls: control: between nodes gradients are neither encrypted nor authenticated: only on a network of "
                "the nodes' own (else --tls all)\n"
            )
        if spec.metrics:
            sys.stdout.write(f"metrics: http://{spec.metrics}/metrics\n")
        sys.stdout.flush()


def conclude(outcome: JobOutcome, run_dir: Path, wall_s: float, model: Sequence[str] = ()) -> int:
    """Print the last lines, a failed script's own error once, or the summary; return the exit code."""
    out = sys.stdout if outcome.exit_code == 0 else sys.stderr
    sys.stdout.flush()
    lines: list[str] = []
    summary = read_summary(run_dir) if outcome.exit_code in (0, 130, 143) else None
    if summary is not None:
        lines += [*summary_lines(summary, run_dir), *model]
    elif outcome.exit_code == 0:
        lines.append(f"ended after {wall_s:.1f} s; run directory: {run_dir}")
    if outcome.exit_code:
        if outcome.detail:
            lines.append(outcome.detail.rstrip())
        log = f"; log: {outcome.log}" if outcome.log else f"; run directory: {run_dir}"
        lines.append(f"everstep: {outcome.error}{log}")
    try:
        out.write("\n".join(lines) + "\n")
        out.flush()
    except OSError:
        pass  # the terminal is gone
    return outcome.exit_code
