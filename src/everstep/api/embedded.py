"""Runs ``python train.py``, with no launcher: master, ps and worker in this process.

The same brain, journal, ps service and audit log as in a job of many processes; only the wire is missing. Every call
is made at once, on the caller's thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec

from everstep.api.listeners import GroupListener, Listener
from everstep.brain import events
from everstep.brain.brain import Brain
from everstep.brain.events import (
    MASTER,
    RULES,
    Answer,
    FactType,
    FinishJob,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    Note,
    ProcessExited,
    PublishGroup,
    PublishPlacement,
    ReleaseShards,
    Sender,
    by_ps,
    by_worker,
)
from everstep.config.load import new_run_dir, save_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, InternalError, PlatformError, ScriptError, UserError, script_place
from everstep.ids import Incarnation, NodeId, Slot
from everstep.machines.dispatch import Dispatch
from everstep.model.group import Group
from everstep.model.member import Address, MemberKey, Role
from everstep.model.placement import Placement
from everstep.monitor.graph_file import GraphRecord, write_graph
from everstep.monitor.graph_fold import GraphFold
from everstep.net import messages
from everstep.net.arena import Arena
from everstep.net.messages import RequestType
from everstep.ps.service import PsService
from everstep.storage.atomic import write_atomic
from everstep.storage.journal import Journal
from everstep.tables.client import PsClient, Sendable, Then

_NODE = NodeId("node0")
_AGENT = Sender("agent", node=_NODE)
_ARENA_BYTES = 256 << 20
EXPIRE_EVERY_S = 1.0
"""Between two looks for rows that are over."""


class DirectLink:
    """Links to a ps in this process: answered before ``submit`` returns."""

    def __init__(self, slot: Slot, service: PsService, arena: Arena) -> None:
        self.slot = slot
        self._service, self._arena = service, arena
        self._expire_due_at = 0.0

    def __repr__(self) -> str:
        return f"<DirectLink ps:{self.slot}>"

    def submit(self, message: Sendable, then: Then) -> None:
        answer, buffers = self._service.handle(message, memoryview(b""), self._arena.view)
        body = b"".join(bytes(b) for b in buffers) if buffers else b""
        then(answer, memoryview(body))
        if isinstance(message, messages.Push) and time.monotonic() >= self._expire_due_at:
            self._expire_due_at = time.monotonic() + EXPIRE_EVERY_S
            self._service.expire()

    def close(self, wait_s: float = 0.0) -> None:
        pass


class EmbeddedMaster:
    """Is a brain and its journal, driven by calls. Thread-safe."""

    def __init__(self, spec: JobSpec, run_dir: Path, service: PsService | None) -> None:
        self.spec, self.run_dir, self.service = spec, run_dir, service
        self.brain = Brain()
        self.journal = Journal(run_dir / "journal.sqlite", Incarnation(1))
        self.placed: Callable[[Placement], None] | None = None
        self.grouped: Callable[[Group], None] | None = None
        self.finished: FinishJob | None = None
        self.values: dict[str, float] = {}  # what the script reported
        self._machine = Dispatch(
            self.brain, time.time, self.journal.append, self.tell, {messages.ValuesReported: self._report}
        )
        self._lock = threading.RLock()
        self._events = (run_dir / "events.jsonl").open("ab")

    def dispatch(self, request: RequestType, sender: Sender) -> Answer:
        """Return the answer to a request."""
        with self._lock:
            answer = self._machine.dispatch(request, sender)
        if answer is None:
            raise InternalError(f"the embedded master did not answer {request!r}")
        return cast(Answer, answer)

    def start(self) -> None:
        """Begin the job, on this node."""
        with self._lock:
            self.tell(MasterStarted(self.journal.incarnation, self.spec, **RULES))
        self.dispatch(NodeJoined(_NODE, "", 0, 0), _AGENT)

    def _report(self, request: messages.ValuesReported, sender: Sender) -> Answer:
        self.values.update(request.values)
        return events.Ok()

    def tell(self, fact: FactType, sender: Sender = MASTER) -> Answer | None:
        """Journal the fact, apply it, do what the brain wants; the answer, if it was a request."""
        with self._lock:
            handled = self._machine.tell(fact, sender)
            for wanted in handled.instructions:
                if isinstance(wanted, PublishGroup):
                    if self.grouped is not None:
                        self.grouped(wanted.group)
                elif self.service is None:
                    pass
                elif isinstance(wanted, ReleaseShards):
                    self.service.release(wanted.shards)
                elif isinstance(wanted, PublishPlacement):
                    self.service.set_placement(wanted.placement)
                    if self.placed is not None:
                        self.placed(wanted.placement)
                if isinstance(wanted, Note):
                    self._note(handled.event.at, wanted)
                elif isinstance(wanted, FinishJob):
                    self.finished = wanted
            return handled.answer

    def _note(self, at: float, note: Note) -> None:
        line = {
            "at": at,
            "member": note.member,
            "action": note.decision.action,
            "reason": note.decision.reason,
            "inputs": note.decision.inputs,
        }
        self._events.write(msgspec.json.encode(line) + b"\n")
        self._events.flush()

    def close(self) -> None:
        with self._lock:
            self.journal.close()
            self._events.close()


def _one_line_errors(script: Path) -> None:
    """End the script, at a mistake that everstep names, with that one line and its exit code, as under ``everstep
    run``; every other exception is shown as Python shows it. EVERSTEP_DEBUG=1 keeps the traceback."""
    shown = sys.excepthook
    if os.environ.get("EVERSTEP_DEBUG") == "1" or shown is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if not isinstance(error, UserError | PlatformError):
            shown(kind, error, tb)
            return
        print(f"everstep: {error} ({script_place(error, script)})", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)

    sys.excepthook = hook


class EmbeddedRuntime:
    """See the top of this file."""

    embedded = True

    def __init__(self, spec: JobSpec, run_dir: Path, prefetch: int = 0) -> None:
        self.spec, self.run_dir, self.prefetch = spec, run_dir, prefetch
        self.slot, self.incarnation, self.node = Slot(0), Incarnation(1), _NODE
        self.arena = Arena(_ARENA_BYTES)
        self.client = PsClient(self.arena)
        self.service: PsService | None = None
        if spec.ps:
            self.service = PsService.create(
                n_partitions=spec.partitions, seed=spec.seed, slot=Slot(0), incarnation=Incarnation(1), run_dir=run_dir
            )
            self.service.limit(spec.ps_limit_bytes, spec.on_full, spec.cold_dir)
        self.master = EmbeddedMaster(spec, run_dir, self.service)
        self._began_at = time.time()
        self._listener: Listener | None = None

    def home_link(self) -> None:
        """Files are here."""

    @classmethod
    def alone(cls, given: dict[str, Any], prefetch: int | None) -> EmbeddedRuntime:
        """Make a new run directory and a job of one worker and one ps."""
        script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
        if script and not hasattr(sys, "ps1"):
            _one_line_errors(Path(script))
        name = given.get("name") or (Path(script).stem if script else "job")
        if given.get("nonfinite", "raise") not in ("raise", "skip"):
            raise ScriptError(f"es.join(nonfinite={given['nonfinite']!r}): must be 'raise' or 'skip'")
        mode, parts = given.get("mode", "ps"), given.get("logical_workers", 0)
        if mode not in ("ps", "allreduce", "pipeline"):
            raise ScriptError(f"es.join(mode={mode!r}): must be 'ps', 'allreduce' or 'pipeline'")
        if not isinstance(parts, int) or isinstance(parts, bool) or parts < 0 or (parts and mode != "allreduce"):
            raise ScriptError(
                f"es.join(logical_workers={parts!r}): must be a whole number from 1, with mode='allreduce'"
            )
        if mode == "pipeline" and given.get("ps", 0):
            raise ScriptError(f"es.join(ps={given['ps']!r}): a model in stages (mode='pipeline') has no ps")
        if given.get("ps", 1) not in ((1,) if mode == "ps" else (0, 1)):
            raise ScriptError(f"es.join(ps={given['ps']!r}): one process has one ps" + " or none" * (mode != "ps"))
        seed = given.get("seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise ScriptError(f"es.join(seed={seed!r}): must be a whole number from 0")
        run_dir = Path(given["run_dir"]) if given.get("run_dir") else new_run_dir(name)
        if (run_dir / "job.json").exists():
            raise ConfigError(f"run directory {run_dir} holds another run: name a new one, or leave run_dir out")
        spec = JobSpec(
            name=name,
            script=script,
            args=tuple(sys.argv[1:]),
            workers=1,
            ps=1 if mode == "ps" else given.get("ps", 0),
            mode=mode,
            logical_workers=parts,
            seed=seed,
            nonfinite=given.get("nonfinite", "raise"),
            run_dir=str(run_dir),
        )
        run_dir.mkdir(parents=True, exist_ok=True)
        save_spec(run_dir, spec, {})
        return cls(spec, run_dir, prefetch or 0)

    @property
    def _me(self) -> Sender:
        return by_worker(self.slot, self.incarnation)

    def start(self, listener: Listener) -> None:
        self._listener = listener
        dispatch, pid = self.master.dispatch, os.getpid()
        self.master.start()
        if self.service is not None:
            joined = MemberJoined(Role.PS, Slot(0), Incarnation(1), _NODE, pid, Address(_NODE))
            dispatch(joined, by_ps(Slot(0), Incarnation(1)))
        answer = dispatch(MemberJoined(Role.WORKER, self.slot, self.incarnation, _NODE, pid), self._me)
        if not isinstance(answer, events.Welcome) or answer.placement is None:
            raise InternalError(f"the embedded master did not place the ps: {answer!r}")
        if self.spec.grouped:
            self.master.grouped = cast(GroupListener, listener).grouped
        if self.service is None:
            return
        self.service.set_placement(answer.placement)
        self.master.placed = self._placed
        self._placed(answer.placement)

    def _placed(self, placement: Placement) -> None:
        service = self.service
        assert self._listener is not None
        assert service is not None
        self.client.set_placement(placement, lambda place: DirectLink(place.slot, service, self.arena))
        self._listener.placed(placement)

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        return self.master.dispatch(request, self._me)

    def ask(self, request: RequestType, then: Callable[[Answer], None]) -> None:
        then(self.call(request, 0.0))

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(after_s, action)
        timer.daemon = True
        timer.start()

    def chief(self) -> bool:
        return True

    # ------------------------------------------------------------ the end

    def _write_graph(self, beat: messages.Beat) -> None:
        """Leave the readings of the model and the tables behind, for ``everstep graph``."""
        fold, at = GraphFold(), time.time()
        fold.take(MemberKey(Role.WORKER, self.slot), self.incarnation, beat.graph, (), at)
        if self.service is not None:
            ps = MemberKey(Role.PS, self.service.slot)
            fold.take(ps, self.service.incarnation, None, self.service.rows.readings(), at)
        view = fold.view()
        if view is not None and view.steps:
            with suppress(PlatformError):  # a full disk costs the file, not the job
                write_graph(self.run_dir, GraphRecord(at=at, graph=view))

    def close(self, error: str) -> None:
        """End the job as the script ended: audit log and journal closed, summary written and printed."""
        listener = self._listener
        beat = listener.beat() if listener is not None else messages.Beat()
        status = 1 if error else 0
        self.master.dispatch(ProcessExited(Role.WORKER, self.slot, self.incarnation, status, error), _AGENT)
        if self.service is not None:
            self.service.finish()
        finished = self.master.finished
        wall_s = time.time() - self._began_at
        samples = int(beat.readings.get("samples", 0.0))
        values = {**self.master.values, **beat.values}
        exit_code = finished.exit_code if finished is not None else status
        summary = {
            "job": self.spec.name,
            "phase": "done" if not exit_code else "failed",
            "exit_code": exit_code,
            "error": error,
            "samples_done": samples,
            "wall_s": wall_s,
            "samples_per_s": samples / wall_s if wall_s > 0 else 0.0,
            "failures": {"worker": 0, "ps": 0, "master": 0, "node": 0},
            "batches_retried": int(beat.readings.get("retried", 0.0)),
            "batches_skipped": int(beat.readings.get("skipped", 0.0)),
            "shards_returned": 0,
            "values": values,
        }
        write_atomic(self.run_dir / "summary.json", msgspec.json.encode(summary))
        self._write_graph(beat)
        self.master.close()
        self._let_go()
        if samples:
            shown = "".join(f", {name} {value:.4g}" for name, value in values.items())
            with suppress(OSError):  # nobody reads our output any more
                print(
                    f"everstep: {samples:,} samples in {wall_s:.1f} s ({samples / wall_s:,.0f}/s){shown}; "
                    f"everstep audit {self.run_dir}",
                    flush=True,
                )

    def _let_go(self) -> None:
        """Free the tables now, also where the script keeps the job in a global variable."""
        self.client.links.clear()
        del self.service, self.master
