"""Holds what the master sees of its members' speed: beats in, ``Observations`` for policies, top and metrics out.

Soft state: a new master has seen nothing yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.members import SlotRecord
from everstep.brain.watch import HeartbeatWatch
from everstep.config.consistency import parse_consistency
from everstep.config.parity import parse_code
from everstep.ids import Incarnation, NodeId
from everstep.master.readings import Readings
from everstep.model.decision import Decision
from everstep.model.member import MemberKey, MemberState, Role
from everstep.model.memory_limit import LIMITS, MemoryLimit
from everstep.model.observation import Observations, Pace, ProcessLoad, ServerSeen, WorkerSeen
from everstep.monitor.process_readings import clean_hardware
from everstep.monitor.rotated import RotatedFile
from everstep.monitor.slowness import by_the_step_under_way
from everstep.monitor.windows import SHORT_S, SUBWINDOWS, Windows
from everstep.policies.node_selection import choose_ps_node
from everstep.policies.process_sizes import memory_setting

WINDOW_VARIABLE = "EVERSTEP_WINDOW_S"
"""For tests and trials: seconds of the short window; the long one is six times as long."""

HISTORY_FILE = "members.jsonl"
HISTORY_BYTES = 16 * 2**20  # of one file; the one before is kept, too
_MEMBERS_MAX = 4096  # of hardware classes remembered


class MemberLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Is one line of ``members.jsonl``: one member over one short window. Times are seconds."""

    at: float
    member: str
    incarnation: int
    node: str
    hardware: str = ""
    per_sample_s: float = 0.0
    samples: int = 0
    compute_s: float = 0.0
    phases: dict[str, float] = {}
    service_s: float = 0.0
    queue: float = 0.0
    bytes_per_s: float = 0.0
    cpu_share: float = 0.0
    throttled_share: float = 0.0
    rss_bytes: int = 0
    rows: int = 0
    row_bytes: int = 0
    limit_bytes: int = 0
    limit_used_bytes: int = 0


class Observer:
    """Observes members: ``take`` the beats, then ``observe``; ``tick`` writes the history."""

    def __init__(self, brain: Brain, readings: Readings, watch: HeartbeatWatch, run_dir: Path) -> None:
        self._brain, self._readings, self._watch = brain, readings, watch
        short_s = float(os.environ.get(WINDOW_VARIABLE, SHORT_S))
        self.windows = Windows(short_s, SUBWINDOWS)
        self.hardware: dict[NodeId, str] = {}
        self._line_at = self._rest_since = 0.0
        self._file = RotatedFile(run_dir / HISTORY_FILE, HISTORY_BYTES)

    def __repr__(self) -> str:
        return f"<observer: {self.windows!r}>"

    # ------------------------------------------------------------ in

    def node(self, node: NodeId, hardware: str) -> None:
        """Its agent said hello."""
        if node in self.hardware or len(self.hardware) < _MEMBERS_MAX:
            self.hardware[node] = clean_hardware(hardware)

    def take(
        self, key: MemberKey, incarnation: Incarnation, readings: Mapping[str, float], at: float
    ) -> Decision | None:
        """A beat came. What to tell of it: readings of this kind are dropped."""
        why = self.windows.take(str(key), incarnation, readings, at)
        if not why:
            return None
        return Decision("readings dropped", f"{why}; they count for nothing until they are right", {"why": why})

    def tick(self, at: float) -> None:
        """Call once a second or so; a line for every member in the history, once in a short window."""
        if self._brain.placement is not None and not self._brain.partitions.at_rest():
            self._rest_since = at
        if at < self._line_at:
            return
        self._line_at = at + self.windows.short_s
        seen = self.observe(at)
        self.windows.keep({str(record.member.key) for record in self._brain.members.all()})
        lines = [
            _line(
                at,
                w,
                per_sample_s=w.short.per_sample_s,
                samples=w.short.samples,
                compute_s=w.short.compute_s,
                phases=w.short.phases,
                bytes_per_s=w.bytes_per_s,
            )
            for w in seen.workers
        ]
        lines += [
            _line(
                at,
                s,
                service_s=s.service_s,
                queue=s.queue,
                bytes_per_s=s.bytes_per_s,
                rows=s.rows,
                row_bytes=s.row_bytes,
                limit_bytes=s.limit_bytes,
                limit_used_bytes=s.limit_used_bytes,
            )
            for s in seen.servers
        ]
        self._file.write([msgspec.json.encode(line) for line in lines])

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------ out

    def observe(self, at: float, span_s: float = 0.0) -> Observations:
        """Return the whole job as it is seen at ``at``; ``span_s``: of workers, in place of the short window."""
        brain = self._brain
        members, spec = brain.members, brain.job.spec
        records = [record for _, record in sorted(members.workers.items()) if is_up(record)]
        workers = by_the_step_under_way([self._worker(record, at, span_s) for record in records])
        servers = tuple(self._server(record, at) for _, record in sorted(members.servers.items()) if is_up(record))
        replicated = spec.grouped
        consistency = parse_consistency(spec.consistency)
        group = brain.state.groups.group
        left = self._remaining_samples()
        batches = [self._last(str(w), w.incarnation, "global_batch") for w in workers] if replicated else []
        return Observations(
            at=at,
            mode=spec.mode,
            consistency="sync" if spec.grouped else consistency.kind,
            backup=asked if (asked := brain.state.control.backup) >= 0 else consistency.backup,
            step=brain.state.groups.step if group is not None else 0,
            global_batch=int(max(batches, default=0.0)),
            wanted_workers=brain.job.workers_wanted,
            pending=pending(brain),
            remaining_s=left / rate if (rate := self._readings.samples_per_s(brain)) > 0 else 0.0,
            remaining_samples=left,
            places=tuple(room.node for room in members.rooms(Role.WORKER) if room.free),
            ps_places=tuple(room.node for room in members.rooms(Role.PS) if choose_ps_node([room]) is not None),
            workers=workers,
            servers=servers,
            wanted_ps=brain.job.ps_wanted if servers else 0,
            min_workers=spec.min_workers,
            max_workers=spec.max_workers,
            min_ps=max(spec.min_ps, parse_code(spec.parity).width if spec.ps else 1),
            max_ps=min(spec.max_ps, spec.partitions),
            optimize=spec.optimize,
            worker_size=brain.concerns.sizes.of(Role.WORKER),
            ps_size=brain.concerns.sizes.of(Role.PS),
            ps_memory_most=brain.concerns.sizes.most_of_ps(),
            sizes=spec.sizes,
            rest_since=self._rest_since,
            samples_done=self._readings.samples_done(brain, self._watch),
            max_memory_bytes=memory_setting(spec.max_memory),
        )

    def _worker(self, record: SlotRecord, at: float, span_s: float) -> WorkerSeen:
        m = record.member
        windows = self.windows.of(str(m.key), m.incarnation)
        load = windows.load(at) if windows is not None else ProcessLoad()
        return WorkerSeen(
            slot=m.slot,
            incarnation=m.incarnation,
            node=m.node,
            hardware=self.hardware.get(m.node, ""),
            since=m.since,
            batch=int(windows.last.get("batch", 0)) if windows is not None else 0,
            accum=max(1, int(windows.last.get("accum", 1))) if windows is not None else 1,
            loader_batch=int(windows.last.get("loader_batch", 0)) if windows is not None else 0,
            memory_batch=int(windows.last.get("memory_batch", 0)) if windows is not None else 0,
            short=windows.pace(at, span_s=span_s) if windows is not None else Pace(),
            long=windows.pace(at, long=True) if windows is not None else Pace(),
            history=windows.history if windows is not None else (),
            cpu_share=load.cpu_share,
            rss_bytes=int(windows.last.get("rss_bytes", 0)) if windows is not None else 0,
            throttled_share=load.throttled_share,
            bytes_per_s=load.bytes_per_s,
            long_load=windows.load(at, long=True) if windows is not None else ProcessLoad(),
        )

    def _server(self, record: SlotRecord, at: float) -> ServerSeen:
        m = record.member
        windows = self.windows.of(str(m.key), m.incarnation)
        load = windows.load(at) if windows is not None else ProcessLoad()
        placement = self._brain.placement
        return ServerSeen(
            slot=m.slot,
            incarnation=m.incarnation,
            node=m.node,
            hardware=self.hardware.get(m.node, ""),
            since=m.since,
            service_s=load.service_s,
            queue=load.queue,
            bytes_per_s=load.bytes_per_s,
            partitions=len(placement.owned_by(m.slot)) if placement is not None else 0,
            history=windows.history if windows is not None else (),
            cpu_share=load.cpu_share,
            rss_bytes=int(windows.last.get("rss_bytes", 0)) if windows is not None else 0,
            throttled_share=load.throttled_share,
            long_load=windows.load(at, long=True) if windows is not None else ProcessLoad(),
            **_memory(windows.last if windows is not None else {}),
        )

    def _last(self, member: str, incarnation: int, name: str) -> float:
        windows = self.windows.of(member, incarnation)
        return windows.last.get(name, 0.0) if windows is not None else 0.0

    def _remaining_samples(self) -> int:
        """Return the samples that remain of the epochs that were asked for so far."""
        total = sum(d.epochs_known * d.plan.samples for d in self._brain.shards.datasets)
        return max(0, total - self._readings.samples_done(self._brain, self._watch))


def _memory(last: Mapping[str, float]) -> dict[str, Any]:
    """Return what a ps says of its memory."""
    kind = int(last.get("limit_kind", 0))
    return {
        "rows": int(last.get("rows", 0)),
        "row_bytes": int(last.get("row_bytes", 0)),
        "limit_kind": LIMITS[kind] if kind < len(LIMITS) else MemoryLimit.NONE,
        "limit_bytes": int(last.get("limit_bytes", 0)),
        "limit_used_bytes": int(last.get("limit_used_bytes", 0)),
    }


def is_up(record: SlotRecord) -> bool:
    """Return whether the process of a slot runs, and has said hello."""
    return record.running and record.member.state is not MemberState.STARTING


def pending(brain: Brain) -> int:
    """Return how many processes are on the way: up, or (ps that are being emptied) down."""
    members = brain.members
    coming = sum(1 for record in members.all() if record.member.state is MemberState.STARTING or record.waiting)
    return coming + sum(1 for slot in brain.state.protection.leaving if members.servers[slot].running)


def _line(at: float, seen: WorkerSeen | ServerSeen, **own: Any) -> MemberLine:
    """Return a member's line; ``own``: what only its role has."""
    return MemberLine(
        at=round(at, 3),
        member=str(seen),
        incarnation=seen.incarnation,
        node=seen.node,
        hardware=seen.hardware,
        cpu_share=seen.cpu_share,
        throttled_share=seen.throttled_share,
        rss_bytes=seen.rss_bytes,
        **own,
    )
