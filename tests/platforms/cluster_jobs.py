"""Real jobs on a cluster of this machine: what a user runs, and what is seen of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from watched_jobs import WatchedJob, until

from everstep.brain.events import CapacityChanged
from everstep.cli.display import read_summary
from everstep.cli.replay import JOURNAL_FILE
from everstep.errors import EverstepError
from everstep.model.capacity import CapacityStep
from everstep.monitor.audit import audit
from everstep.storage.journal import read_journal


class ClusterRun(WatchedJob):
    """Is one ``everstep run --on ...`` and its run directory."""

    def __init__(self, folder: Path, env: Mapping[str, str], cluster: Callable[[], str] = str) -> None:
        """``cluster``: what the cluster says of itself, for stories."""
        super().__init__(folder, folder / "run")
        self.cluster = cluster
        self.env = {**os.environ, **env}
        self.process: subprocess.Popen[bytes] | None = None
        self.words: list[str] = []

    def start(self, *words: str) -> None:
        """Begin, or begin again with the same words."""
        self.words = list(words) or self.words
        argv = [sys.executable, "-m", "everstep.cli", "run", "--no-display", "--run-dir", str(self.run_dir)]
        with (self.folder / "everstep.log").open("ab") as out:
            self.process = subprocess.Popen(
                [*argv, *self.words, str(self.script)], env=self.env, stdout=out, stderr=out, cwd=self.folder
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def everstep(self, *words: str) -> str:
        argv = [sys.executable, "-m", "everstep.cli", *words]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr + self.story()
        return done.stdout

    def trained(self, more: int) -> None:
        until(lambda: self.view() is not None, self.story)
        start = self.samples()
        until(lambda: self.samples() >= start + more, self.story)

    def nodes(self) -> list[str]:
        view = self.view()
        return sorted(n.node for n in view.nodes if n.alive and n.node != "node0") if view is not None else []

    def whole(self, nodes: int) -> None:
        """Wait until so many nodes are there, and every member."""

        def ok() -> bool:
            view = self.view()
            if view is None or len(self.nodes()) != nodes:
                return False
            up = [m for m in view.members if m.up and m.role != "master"]
            return len(up) == sum(view.members_wanted.values())

        until(ok, self.story)

    def story(self) -> str:
        logs = [self.folder / "everstep.log", *sorted(self.run_dir.glob("nodes/*.log"))]
        ends = [f"--- {log.name}\n" + log.read_text(errors="replace")[-1500:] for log in logs if log.exists()]
        view = self.view()
        shown = (view.nodes, view.members_wanted, [(str(m), m.state, m.node) for m in view.members]) if view else None
        return f"{shown}\n{self.nodes_told()}\n{self.cluster()}\n" + "\n".join(ends)

    def nodes_told(self) -> list[str]:
        """Return what the journal says of nodes of the cluster, in its order."""
        with contextlib.suppress(EverstepError, OSError):
            facts = [entry.event.fact for entry in read_journal(self.run_dir / JOURNAL_FILE)]
            return [f"{f.node} {f.step.value}" for f in facts if isinstance(f, CapacityChanged)]
        return []

    def ends_well(self) -> None:
        """Let the job end: its audit is exact."""
        self.hurry_file.touch()
        assert self.process is not None
        assert self.process.wait(300) == 0, self.story()
        summary = read_summary(self.run_dir)
        assert summary is not None and summary.exit_code == 0, self.story()
        report = audit(self.run_dir)
        assert report.ok, report.text() + self.story()
        self.paid_once()

    def paid_once(self) -> None:
        """Assert that the journal has each node once, and the end of each that is gone, as the costs need it."""
        granted: Counter[str] = Counter()
        ended: set[str] = set()
        for entry in read_journal(self.run_dir / JOURNAL_FILE):
            match entry.event.fact:
                case CapacityChanged(node=node, step=CapacityStep.GRANTED):
                    granted[node] += 1
                case CapacityChanged(node=node, step=CapacityStep.TAKEN_BACK | CapacityStep.GIVEN_BACK):
                    ended.add(node)
                case _:
                    pass
        assert granted and set(granted.values()) == {1}, granted
        left = set(granted) - ended
        assert len(left) <= 3, f"{sorted(left)} are paid to the end: {granted}, ended {sorted(ended)}"

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            self.process.kill()
            self.process.wait(30)
