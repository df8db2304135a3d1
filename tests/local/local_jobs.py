"""A real job of real processes on this machine, driven from outside as a user would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from everstep.agent.rundir import in_use
from everstep.cli.link import ask_master
from everstep.errors import EverstepError
from everstep.model.job_view import JobView, MemberView
from everstep.model.member import Role
from everstep.net.messages import GetStatus

SCRIPT = """
import os, time
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
rows, batch = {rows}, {batch}
rng = np.random.default_rng(0)
ids = rng.integers(0, 500, (rows, 2))
data = {{"ids": ids, "label": (ids.sum(1) % 2).astype(np.float32)}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(500, 4, mode="sum")
        self.top = nn.Linear(4, 1)
    def forward(self, b):
        return self.top(self.bag(b["ids"])).squeeze(1)

model = job.replicate(job.sparse(Net()))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
print("worker", job.slot, "begins", flush=True)
for batch in job.steps(job.loader(data, batch_size=batch, epochs={epochs})):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad(); loss.backward(); opt.step()
    job.report(loss=loss)
    if not os.path.exists({hurry!r}):
        time.sleep({pause_s})
print("worker", job.slot, "ends", flush=True)
"""


def processes_of(run_dir: Path) -> dict[int, str]:
    """pid -> command line of every living process that was started for this run directory."""
    needle = f"EVERSTEP_RUN_DIR={run_dir}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def until(what: Callable[[], object], timeout_s: float = 180.0, why: Callable[[], str] = lambda: "") -> None:
    """Less than what a test has in all: whoever waits in vain says what it saw."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"it did not happen within {timeout_s} s: {why()}"
        time.sleep(0.05)


class Run:
    """``everstep run`` as a subprocess."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.script = folder / "train.py"
        self.out = folder / "out.txt"
        self.popen: subprocess.Popen[bytes] | None = None
        self.joined: dict[str, subprocess.Popen[bytes]] = {}
        self.write()

    def write(self, rows: int = 2000, epochs: int = 4, pause_s: float = 0.2, batch: int = 100) -> None:
        """``pause_s``: after each batch, until somebody is in a hurry."""
        text = SCRIPT.format(rows=rows, epochs=epochs, pause_s=pause_s, batch=batch, hurry=str(self._hurry))
        self.script.write_text(text)

    @property
    def _hurry(self) -> Path:
        return self.folder / "hurry"

    def hurry(self) -> None:
        """What the job was slow for has happened: from now on its script does not pause."""
        self._hurry.touch()

    def start(self, *flags: str, under: tuple[str, ...] = (), args: tuple[str, ...] = ()) -> Run:
        """``args``: of the script."""
        argv = [*under, sys.executable, "-m", "everstep.cli", "run", "--run-dir", str(self.run_dir), *flags]
        with self.out.open("wb") as out:
            self.popen = subprocess.Popen(
                [*argv, str(self.script), *args], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder
            )
        return self

    def go_on(self, *flags: str) -> None:
        """``everstep unsuspend`` in place of ``everstep run``."""
        self.go_on_from(str(self.run_dir), *flags)

    def go_on_from(self, source: str, *flags: str) -> None:
        """As ``go_on``, from another place."""
        argv = [sys.executable, "-m", "everstep.cli", "unsuspend", source, "--no-display", *flags]
        with self.out.open("ab") as out:
            self.popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder)

    def everstep(self, *args: str, timeout_s: float = 240.0) -> tuple[int, str]:
        """Another command: exit code, output."""
        argv = [sys.executable, "-m", "everstep.cli", *args]
        done = subprocess.run(argv, cwd=self.folder, capture_output=True, text=True, timeout=timeout_s)
        return done.returncode, done.stdout + done.stderr

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def status(self) -> JobView | None:
        if not in_use(self.run_dir):
            return None
        try:
            answer = ask_master(self.run_dir, GetStatus(), timeout_s=2.0)
        except (EverstepError, OSError):
            return None
        assert isinstance(answer, JobView)
        return answer

    def member(self, role: Role, slot: int) -> MemberView | None:
        status = self.status()
        for m in status.members if status is not None else ():
            if (m.role, m.slot) == (role, slot):
                return m
        return None

    def alive(self, role: Role, slot: int, at_least: int = 1) -> MemberView:
        """That member, once it is alive with at least this incarnation."""
        found: list[MemberView] = []

        def look() -> bool:
            m = self.member(role, slot)
            if m is not None and m.state == "alive" and m.pid and m.incarnation >= at_least:
                found.append(m)
            return bool(found)

        until(look, why=self.story)
        return found[0]

    def master_pid(self, other_than: int = 0) -> int:
        from everstep.net.rendezvous import read_master

        found: list[int] = []

        def look() -> bool:
            info = read_master(self.run_dir)
            if info is not None and info.pid != other_than and self.status() is not None:
                found.append(info.pid)
            return bool(found)

        until(look, why=self.story)
        return found[0]

    def trained(self, samples: int) -> None:
        """Wait until so many samples are done."""

        def look() -> bool:
            status = self.status()
            return status is not None and status.samples_done >= samples

        until(look, why=self.story)

    def samples(self) -> int:
        """Done so far; 0 where nobody answers."""
        status = self.status()
        return status.samples_done if status is not None else 0

    def wait(self, timeout_s: float = 240.0) -> int:
        assert self.popen is not None
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout_s} s\n{self.story()}") from None

    def ended_well(self, timeout_s: float = 240.0) -> None:
        """It ends by itself, every sample counts exactly once, and nothing is left of it."""
        assert self.wait(timeout_s) == 0, self.story()
        assert self.leftovers() == {}
        self.check_audit()

    def story(self) -> str:
        """What a person would look at first."""
        parts = [f"--- output\n{self.text()[-3000:]}"]
        for log in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)

    def gone(self, pid: int) -> bool:
        """Whether that process has ended."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    def processes(self) -> dict[int, str]:
        return processes_of(self.run_dir)

    def leftovers(self, run_dir: Path | None = None) -> dict[int, str]:
        """Processes that are still there although the job has ended; waits for those that are just dying."""
        where = run_dir or self.run_dir
        with contextlib.suppress(AssertionError):
            until(lambda: not processes_of(where), 10.0)
        return processes_of(where)

    # ------------------------------------------------------------ other nodes

    def join(self, node: str, argv: list[str], run_dir: Path) -> None:
        with (self.folder / f"{node}.txt").open("wb") as out:
            self.joined[node] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder, start_new_session=True
            )

    def join_text(self, node: str) -> str:
        return (self.folder / f"{node}.txt").read_text(errors="replace")

    def wait_join(self, node: str, timeout_s: float = 240.0) -> int:
        return self.joined[node].wait(timeout_s)

    def kill_join(self, node: str) -> None:
        self.joined[node].send_signal(signal.SIGKILL)
        self.joined[node].wait()

    def alive_on(self, node: str) -> MemberView:
        """A worker of that node, once it is alive."""
        found: list[MemberView] = []

        def look() -> bool:
            status = self.status()
            found.extend(
                m
                for m in (status.members if status is not None else ())
                if m.node == node and m.state == "alive" and m.pid and m.role == Role.WORKER
            )
            return bool(found)

        until(look, why=lambda: f"{self.story()}\n--- {node}\n{self.join_text(node)}")
        return found[0]

    def check_audit(self) -> None:
        from everstep.monitor.audit import audit

        report = audit(self.run_dir)
        assert report.ok and report.finished, report.text()

    def close(self) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()
        for joined in self.joined.values():
            joined.kill()
            joined.wait()
        where = [self.run_dir, *(self.folder / node for node in self.joined)]
        for pid in [pid for path in where for pid in processes_of(path)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
