"""Does the shell's part of checkpoints: when one is due, orders to the ps, manifests and deletions in a thread.

Everything here may be lost and done again: what is wanted is in the brain's state, and it is said again every
``REASK_S`` to those ps that own a partition without a snapshot (they may have taken it over, or be new), and to a ps
that says hello. A place that cannot be written to costs checkpoints, never training.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from everstep import __version__, faultpoints
from everstep.brain.brain import Brain
from everstep.brain.checkpoints import has_checkpoints, leaves_model, replica_start
from everstep.brain.events import (
    CheckpointAsked,
    CheckpointCommitted,
    FactType,
    JobResumed,
    ReplicaWritten,
    StepsCommitted,
)
from everstep.brain.job import Phase
from everstep.config.every import parse_every
from everstep.config.spec import JobSpec
from everstep.errors import EverstepError, StorageError
from everstep.ids import Incarnation, Slot
from everstep.master.readings import Readings
from everstep.model.member import MemberKey, Role
from everstep.model.reasons import CheckpointReason
from everstep.model.snapshot import Manifest
from everstep.net.messages import OrderType, TakeReplica, TakeSnapshots
from everstep.net.retry import StoppedError, retry
from everstep.policies.checkpoints import is_due
from everstep.protect.manifest import drop_checkpoints, list_checkpoints, read_manifest, write_manifest
from everstep.protect.model import IN_RUN_DIR, MODEL_LIMIT_BYTES, model_url, too_large
from everstep.protect.sources import own_url, read_origin
from everstep.storage.places import StoragePlace, open_place

REASK_S = 5.0
COMMIT_S = 60.0  # a place that does not take the manifest is tried again for so long

logger = logging.getLogger("everstep.master")


class CheckpointController:
    """Sees to checkpoints: ``tell(event)`` goes to the brain, by the journal, ``send(slot, order)`` to that ps, if it
    is connected, and ``send_worker`` to that worker. ``send(slot, order)``: to that ps, if it is connected;
    ``send_worker``: to that worker."""

    def __init__(
        self,
        brain: Brain,
        spec: JobSpec,
        run_dir: Path,
        readings: Readings,
        now: Callable[[], float],
        tell: Callable[[FactType], object],
        send: Callable[[Slot, OrderType], None],
        send_worker: Callable[[Slot, OrderType], None] = lambda slot, order: None,
        key: bytes = b"",
    ) -> None:
        """``key``: what manifests are written with, see ``Secret.checkpoint_key``."""
        self._key = key
        self._brain, self._spec, self._run_dir = brain, spec, run_dir
        self._readings, self._now, self._tell, self._send = readings, now, tell, send
        self._send_worker = send_worker
        self._every = parse_every(spec.checkpoint_every)
        self._url = own_url(spec, run_dir)
        self._limit = MODEL_LIMIT_BYTES if spec.model_to == IN_RUN_DIR else 0
        self._asked_at = 0.0
        self._asked = 0  # the checkpoint that ``_asked_at`` is of
        self._asked_of = Slot(-1)  # and the worker that is to write it
        self._batches: dict[tuple[Slot, Incarnation], int] = {}
        self._batches_then = 0  # when the last checkpoint began, as far as this master knows
        self._committing = 0
        self._work: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()

    def __repr__(self) -> str:
        return f"<checkpoint controller {self._every} to {self._url} {self._brain.checkpoints!r}>"

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """After ``MasterStarted``, before anybody is heard. Raises ConfigError: what it goes on from is damaged."""
        if self._spec.resume_from and not self._brain.checkpoints.resumed:
            origin = read_origin(self._run_dir)
            self._tell(JobResumed(origin.manifest, origin.url, origin.numbers))

    async def close(self) -> None:
        """Ends what is being tried again; waits for what is being written, a moment."""
        self._closing.set()
        if self._work:
            await asyncio.wait(self._work, timeout=2.0)

    def tick(self, at: float) -> None:
        """Call several times a second."""
        brain = self._brain
        if brain.job.over:
            return
        writing = brain.checkpoints.writing
        if writing is None:
            if brain.job.phase is Phase.TRAINING and self._due(at):
                self._tell(CheckpointAsked(CheckpointReason.DUE))
            return
        if writing.manifest is not None:
            self.commit(writing.manifest)  # (ordered by the master before this one)
        elif at - writing.began_at >= brain.checkpoints.limit_s:
            self._tell(CheckpointAsked(CheckpointReason.LATE))
        elif (self._asked, self._asked_of) != (writing.number, writing.writer) or at - self._asked_at >= REASK_S:
            self.order_snapshots()

    def _due(self, at: float) -> bool:
        if self._every.never or not any(dataset.epochs for dataset in self._brain.shards.datasets):
            return False  # (nothing was trained yet)
        began_at = max(self._brain.checkpoints.begun_at, self._brain.job.started_at)
        for record in self._brain.members.workers.values():
            member = record.member
            readings = self._readings.of(MemberKey(Role.WORKER, member.slot), member.incarnation)
            if "batches" in readings:
                self._batches[member.slot, member.incarnation] = int(readings["batches"])
        every_s = (self._every.seconds and self._brain.state.spot.interval_s) or self._every.seconds
        if self._brain.takes(StepsCommitted):
            if self._brain.state.groups.step <= replica_start(self._brain.checkpoints)[0].step:
                return False  # the newest one has everything
            since = self._brain.state.groups.step - self._batches_then
            return is_due(every_s, self._every.batches, at - began_at, since)
        return is_due(every_s, self._every.batches, at - began_at, self._batches_now - self._batches_then)

    @property
    def _batches_now(self) -> int:
        return sum(self._batches.values())

    # ------------------------------------------------------------ orders to the ps

    def order_snapshots(self) -> None:
        """Order snapshots from every ps that owns a partition without one."""
        brain, at = self._brain, self._now()
        writing, placement = brain.checkpoints.writing, brain.placement
        if writing is not None and (writing.manifest or writing.partial) is None and brain.takes(ReplicaWritten):
            self._order_replica(writing.number, at)
            return
        if writing is None or placement is None or writing.manifest is not None:
            return
        if self._asked != writing.number:
            self._batches_then = self._batches_now
        self._asked, self._asked_at = writing.number, at
        if writing.ends_job and not has_checkpoints(self._spec) and (why := self._too_large()):
            self._tell(CheckpointCommitted(writing.number, why))
            return
        lacking = {slot for partition, slot in enumerate(placement.owner) if partition not in writing.snapshots}
        for slot in sorted(lacking):
            self._send(slot, TakeSnapshots(writing.number, writing.since, self._url))

    def _too_large(self) -> str:
        """Return why the model in the memory of the ps is not left where nobody asked for it; "": it is."""
        records = [record.member for record in self._brain.members.servers.values() if record.running]
        total = int(sum(self._readings.of(m.key, m.incarnation).get("store_bytes", 0.0) for m in records))
        return too_large(total) if self._limit and total > self._limit else ""

    def _order_replica(self, number: int, at: float) -> None:
        """To the leader of the group: any member could, and this one has had the state for longest. While the group
        comes to rest it is not ordered yet."""
        if not self._brain.groups.at_rest:
            return
        if self._asked != number:
            self._batches_then = self._brain.state.groups.step
        self._asked, self._asked_at = number, at
        group, writing = self._brain.state.groups.group, self._brain.checkpoints.writing
        self._asked_of = writing.writer if writing is not None else Slot(-1)
        nobody_waits = writing is not None and writing.reason is CheckpointReason.DUE
        unhurried = writing is not None and writing.reason in (CheckpointReason.DUE, CheckpointReason.ASKED)
        order = TakeReplica(
            number,
            self._url,
            idle=nobody_waits and not self._brain.checkpoints.stopping,
            since=writing.since if writing is not None else 0,
            copies=unhurried and not self._brain.checkpoints.stopping,
        )
        if writing is not None and writing.ends_job and leaves_model(self._spec):
            only = self._limit if not has_checkpoints(self._spec) else 0
            order = TakeReplica(number, self._url, model_url(self._spec, self._run_dir), only)
        writer = self._brain.members.workers.get(writing.writer) if writing is not None else None
        if writer is not None and writer.running:
            self._send_worker(writer.member.slot, order)
        elif group is not None and group.members:
            self._send_worker(group.members[0].slot, order)

    def hello(self, slot: Slot) -> None:
        """This ps said hello: what it may not have heard."""
        writing = self._brain.checkpoints.writing
        if (
            writing is not None
            and writing.manifest is None
            and (writing.partial or not self._brain.takes(ReplicaWritten))
        ):
            self._send(slot, TakeSnapshots(writing.number, writing.since, self._url))

    # ------------------------------------------------------------ the place

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest in a thread, then tell the brain."""
        if self._committing == manifest.checkpoint:
            return
        self._committing = manifest.checkpoint
        complete = msgspec.structs.replace(manifest, everstep=__version__, values=dict(self._readings.values))
        self._spawn(self._commit(complete))

    async def _commit(self, manifest: Manifest) -> None:
        error = await asyncio.to_thread(self._write, manifest)
        if not self._closing.is_set() or not error:
            self._tell(CheckpointCommitted(manifest.checkpoint, error))

    def _write(self, manifest: Manifest) -> str:
        """Write the manifest, in a thread: "" or why it cannot be written."""
        end = self._now() + COMMIT_S

        def attempt() -> None:
            faultpoints.reach("before_manifest")
            write_manifest(open_place(self._url), manifest, self._key)
            faultpoints.reach("after_manifest")

        def again(error: StorageError) -> bool:
            if not error.passing or self._now() >= end:
                return False
            logger.warning("%s; trying again, training goes on", error)
            return True

        try:
            retry(attempt, StorageError, again=again, first_s=0.2, limit_s=5.0, wait=self._closing.wait)
        except StoppedError:
            return "the master ends"
        except EverstepError as error:
            return str(error)
        return ""

    def drop(self, checkpoints: tuple[int, ...]) -> None:
        """Delete them and what only they need, in a thread. What cannot be deleted stays."""
        self._spawn(self._dropped(checkpoints))

    async def _dropped(self, checkpoints: tuple[int, ...]) -> None:
        await asyncio.to_thread(self._drop, checkpoints)

    def _drop(self, checkpoints: tuple[int, ...]) -> None:
        try:
            place = open_place(self._url)
            drop_checkpoints(place, checkpoints)
            self._sweep(place, checkpoints)
        except EverstepError as error:
            logger.warning("old checkpoints %s stay: %s", list(checkpoints), error)

    def _sweep(self, place: StoragePlace, checkpoints: tuple[int, ...]) -> None:
        """Delete files of checkpoints that never got a manifest. Raises StorageError, CheckpointError: nothing more
        goes."""
        folders = tuple(f"images/{number:06d}/" for number in checkpoints)
        paths = {path for path in place.sizes() if path.startswith(folders)}
        for number in list_checkpoints(place) if paths else []:
            manifest = read_manifest(place, number)
            paths -= {file.path for file in manifest.files()}
        for path in sorted(paths):
            place.delete(path)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
