"""Has the master's part of ``everstep graph``: readings of the model and the tables, and what binds the job.

Soft state: a new master knows what its members tell it again. ``RUN_DIR/graph.json`` has the newest view, also after
the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from everstep.brain.brain import Brain
from everstep.errors import PlatformError
from everstep.master.observe import Observer
from everstep.model.job_view import BindingView
from everstep.model.member import Role
from everstep.model.observation import Observations
from everstep.model.partition_load import PartitionView
from everstep.monitor.graph_file import GraphRecord, write_graph
from everstep.monitor.graph_fold import GraphFold
from everstep.policies.binding import BindingWatch, BoundJob, Cores

logger = logging.getLogger("everstep.master")

_WRITE_S: Final = 10.0


class GraphController:
    """Holds the readings; ``fold.take`` them as they come, ``tick`` now and then."""

    def __init__(
        self, brain: Brain, observer: Observer, run_dir: Path, hottest: Callable[[], tuple[PartitionView, ...]]
    ) -> None:
        """``hottest()``: the partitions with most to do."""
        self.fold = GraphFold()
        self.hottest = hottest
        self._brain, self._observer, self._run_dir = brain, observer, run_dir
        self._watch = BindingWatch()
        self._window_at = self._write_at = self._at = 0.0
        self._binding: BoundJob | None = None
        self._looking = False  # a thread reads ``_watch``, which changes only while none does

    def __repr__(self) -> str:
        return f"<GraphController {self.fold!r} {self._watch!r}>"

    def tick(self, at: float) -> None:
        """Take a window of speed once in a window's time; write the file now and then. ``at``: seconds."""
        self._at = at
        if at >= self._window_at and not self._looking:
            self._window_at = at + self._observer.windows.short_s
            if self._watch.take(self._observer.observe(at)):
                self._looking = True
                threading.Thread(target=self._look, name="everstep-binding", daemon=True).start()
            self.fold.gone([slot for slot, record in self._brain.members.servers.items() if not record.running])
        if at >= self._write_at:
            self._write_at = at + _WRITE_S
            self.write()

    def _look(self) -> None:
        """Fit the model of speed, on a thread of its own: it takes up to 0.15 s, in which the master has to answer."""
        try:
            self._binding = self._watch.look()
        finally:
            self._looking = False

    def binding(self, at: float) -> BindingView | None:
        """Return what keeps the job from being faster; None: not known yet."""
        binding = self._binding
        if binding is None:
            return None
        words = binding.words(self._cores(self._observer.observe(at)))
        return BindingView(words, {name: round(share, 4) for name, share in binding.shares.items()})

    def _cores(self, seen: Observations) -> dict[Role, Cores]:
        """Return the cores of the machines that each role runs on, where all of its members told theirs."""
        out = {}
        newest, members = self._observer.windows.newest, self._brain.members
        for role, ups in ((Role.WORKER, seen.workers), (Role.PS, seen.servers)):
            cores: dict[str, float] = {}
            for member in ups:
                cores_here = newest(str(member), member.incarnation).get("cores", 0.0)
                machine = members.machine_of(member.node)
                cores[machine] = max(cores.get(machine, 0.0), cores_here)
            if cores and min(cores.values()) > 0:
                out[role] = Cores(sum(member.cpu_share for member in ups), sum(cores.values()))
        return out

    def write(self) -> None:
        """Write the newest view, if there is one. A full disk costs the file, never the job."""
        view = self.fold.view()
        if view is None:
            return
        record = GraphRecord(at=self._at, graph=view, binding=self.binding(self._at), hottest=self.hottest())
        try:
            write_graph(self._run_dir, record)
        except PlatformError as error:
            logger.warning("%s", error)
