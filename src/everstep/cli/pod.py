"""Runs the master or an agent of a job in a pod (``everstep pod``, hidden: the operator writes it into pods).

A pod may be killed at any moment. A master that is killed goes on in the next pod from the journal on its volume, and
the members go on meanwhile; so SIGTERM ends it like a kill. A job that has ended stays ended: its exit code is given
again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from everstep import faultpoints
from everstep.agent.rundir import RunDirLock, remove_sockets
from everstep.bounds import MALFORMED
from everstep.cli.display import read_summary
from everstep.cli.run import SUSPENDED, home_files, run_terms
from everstep.cli.suspend import go_on
from everstep.config.load import check_script, load_spec, read_origins, read_spec, save_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, StorageError
from everstep.platforms.local import before_exec
from everstep.storage.atomic import write_atomic
from everstep.storage.kept_run import JOB_FILE, keep_run, read_kept, refuse_others
from everstep.storage.places import open_place

JOIN_WAIT_S = 600.0
"""So long an agent waits for a master that is not there yet: its image may still be pulled."""
KILLED = 143
SETTINGS = "EVERSTEP_POD_SETTINGS"
SECRET = "EVERSTEP_POD_SECRET"
UNSUSPEND = "EVERSTEP_POD_UNSUSPEND"
OUT = "EVERSTEP_POD_OUT"
UID = "EVERSTEP_POD_UID"
JOB = "EVERSTEP_POD_JOB"
_settings_decoder = msgspec.json.Decoder(dict[str, Any])


def pod_master(run_dir: Path, host: str, env: Mapping[str, str]) -> int:
    """Run the master of a job whose run directory is on a volume, until the job ends; return the exit code. SIGTERM
    ends it like a kill."""
    parent = os.getpid()
    child = os.fork()
    if not child:
        before_exec(parent)()
        return _master(run_dir, host, env)

    def kill(signo: int, frame: FrameType | None) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    signal.signal(signal.SIGINT, kill)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return KILLED if code < 0 else code


def _master(run_dir: Path, host: str, env: Mapping[str, str]) -> int:
    with RunDirLock.take(run_dir):
        remove_sockets(run_dir)
        began = (run_dir / "job.json").exists()
        if began:
            summary = read_summary(run_dir)
            if summary is not None and summary.is_suspended:
                if not env.get(UNSUSPEND):
                    return SUSPENDED
                go_on(run_dir, summary.suspensions, "the job was unsuspended")
            elif summary is not None:
                return summary.exit_code or 0
            spec, origins = read_spec(run_dir), read_origins(run_dir)
        else:
            spec, origins = settings_of(env)
            refuse_other_out(spec.name, env)
        port = spec.bind.rpartition(":")[2]
        spec = msgspec.structs.replace(spec, bind=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        spec = msgspec.structs.replace(spec, script=str(check_script(spec.script)))
        spec, files = home_files(spec, run_dir)

        def prepare() -> None:
            if not began:
                write_secret(run_dir / "secret", env)
            save_spec(run_dir, spec, origins)

        return run_terms(spec, run_dir, False, prepare, files)


def refuse_other_out(job: str, env: Mapping[str, str]) -> None:
    """Raise ConfigError if another job has left something at this job's ``spec.out``. A place that cannot be reached
    now is nothing to wait for."""
    if env.get(OUT):
        place = open_place(env[OUT])
        with contextlib.suppress(StorageError):
            refuse_others(place, read_kept(place), job, env.get(UID, ""))


def pod_out(run_dir: Path, to: str, env: Mapping[str, str]) -> int:
    """Write what a job leaves on its volume to ``to``; return the exit code. Raises ConfigError: it is another job's;
    StorageError, PlatformError."""
    try:
        job = _settings_decoder.decode(env.get(JOB, ""))
        name, uid = str(job["metadata"]["name"]), str(job["metadata"].get("uid", ""))
    except (*MALFORMED, KeyError, TypeError):
        raise ConfigError(f"{JOB}: expected the job in JSON; the operator sets it") from None
    faultpoints.planted()
    with RunDirLock.take(run_dir):
        write_atomic(run_dir / JOB_FILE, msgspec.json.encode(job))
        index = keep_run(open_place(to), run_dir, name, uid)
    size_bytes = sum(file.size_bytes for file in index.files)
    print(f"everstep: {name}: {len(index.files)} files, {size_bytes:,} bytes are at {to}", flush=True)
    return 0


def settings_of(env: Mapping[str, str]) -> tuple[JobSpec, dict[str, str]]:
    """Return the job as the operator wrote it into the pod. Raises ConfigError."""
    try:
        flags = _settings_decoder.decode(env.get(SETTINGS, ""))
    except MALFORMED:
        raise ConfigError(f"{SETTINGS}: expected the settings of a job in JSON; the operator sets it") from None
    return load_spec(None, flags, {})


def write_secret(path: Path, env: Mapping[str, str]) -> None:
    """Write the job's secret to a file of this pod. Raises ConfigError."""
    text = env.get(SECRET, "")
    if not text:
        raise ConfigError(f"{SECRET}: is empty; the operator sets it from the job's Secret")
    part = path.with_name(f"{path.name}.part")
    part.touch(mode=0o600)
    part.write_text(text)
    part.replace(path)


def pod_agent(
    master: str, role: str, run_dir: Path, node: str, host: str, machine: str, market: str, env: Mapping[str, str]
) -> int:
    """Run the agent of a pod with one worker or one ps until the job ends; return the exit code."""
    from everstep.cli.join import join_job

    run_dir.mkdir(parents=True, exist_ok=True)
    secret = run_dir / "secret"
    write_secret(secret, env)
    return join_job(
        master,
        secret,
        1 if role == "worker" else 0,
        run_dir / f"agent-{time.time_ns()}",
        node,
        ps=1 if role == "ps" else 0,
        market=market,
        machine=machine,
        host=host,
        join_s=JOIN_WAIT_S,
        keep_logs=True,
    )
