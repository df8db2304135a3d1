"""A Slurm of this machine for tests: its own munged, slurmctld and one slurmd for each node, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from everstep.platforms.local import die_with_parent

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
StateSaveLocation={dir}/state
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdSpoolDir={dir}/spool.%n
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmdLogFile={dir}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
EnforcePartLimits=ALL
KillWait=10
MinJobAge=600
{nodes}
PartitionName=spot Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=closed Nodes=ALL AllowAccounts=team State=UP PriorityTier=1 PreemptMode=OFF
"""


def missing() -> str:
    """Return why there can be no Slurm here; "": there can."""
    lacking = [command for command in COMMANDS if shutil.which(command, path=_PATH) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "slurmctld of a test runs as root only"


def _ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


class SlurmHere:
    """Runs from its making to ``close``. ``nodes``: how many there are, n1 and on."""

    def __init__(self, nodes: int = 3) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-test-"))
        self.folder.chmod(0o755)
        self.conf = self.folder / "slurm.conf"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start(nodes)
        except BaseException:
            self.close()
            raise

    def _start(self, nodes: int) -> None:
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        ctld, *ports = _ports(nodes + 1)
        lines = [
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for i, port in enumerate(ports, 1)
        ]
        said = {"host": host, "ctld": ctld, "munge": munge / "socket", "dir": self.folder, "nodes": "\n".join(lines)}
        self.conf.write_text(_CONF.format(**said))
        self._run(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        self._until(lambda: (munge / "socket").exists(), "munged has no socket")
        self._run("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        for i in range(1, nodes + 1):
            self.start_node(f"n{i}")
        self._until(lambda: self.said("sinfo", "-h", "-t", "idle", "-o", "%D").split()[:1] == [str(nodes)], "not idle")

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which the commands of Slurm are run."""
        return {"SLURM_CONF": str(self.conf), "PATH": _PATH}

    def _run(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._running[name] = subprocess.Popen(
                argv,
                env={**os.environ, **self.env},
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def start_node(self, node: str) -> None:
        self._run(node, "slurmd", "-D", "-f", str(self.conf), "-N", node)

    def kill_node(self, node: str) -> None:
        """Lose a machine: its slurmd and all that runs on it, without a word. Slurm is told that it is down."""
        self._running.pop(node).kill()
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.said("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=killed")

    def processes(self, node: str = "") -> list[int]:
        """Return the processes of jobs, of one node or of all."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                env = (entry / "environ").read_bytes().split(b"\0")
                conf = f"SLURM_CONF={self.conf}".encode() in env
                names = [v.partition(b"=")[2].decode() for v in env if v.startswith(b"SLURMD_NODENAME=")]
                if conf and names and node in ("", *names):
                    found.append(int(entry.name))
        return found

    def said(self, *argv: str, text: str = "") -> str:
        done = subprocess.run(
            argv, input=text, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def jobs(self) -> list[str]:
        """Return the jobs that wait or run: ``ID NAME STATE NODE COMMENT``."""
        return self.said("squeue", "-h", "-o", "%i %j %T %N %k").splitlines()

    def state(self) -> str:
        """Return what Slurm says of its nodes and jobs, for people."""
        return self.said("sinfo", "-N", "-h", "-o", "%N %P %T %E") + self.said("squeue", "-h", "-o", "%i %j %T %r")

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in self.folder.glob("*.log")
        )

    def _until(self, what, why: str, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end, f"{why}: {self.logs()}"
            time.sleep(0.2)

    def close(self) -> None:
        """End everything, by its process id."""
        with contextlib.suppress(Exception):
            for job in self.jobs():
                self.said("scancel", "--signal=KILL", "--full", job.split()[0])
        for name in [n for n in self._running if n != "munged"]:
            self._end(name)
        self._end("munged")
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
