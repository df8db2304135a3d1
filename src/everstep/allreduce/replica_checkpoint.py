"""Checkpoints of the training state: the leader writes a snapshot while training goes on; anybody loads it.

The thread that trains only copies the state (at a boundary of two steps): script and optimizers may change any of it
from then on. Another thread does the larger part, checksums and files, in the idle slots of the steps that follow
(``machines.idle_slot``), so that no single step lends it the processors for all of that. It writes where the job's
checkpoints lie, and tells the master once all members have committed every step before its position. The manifest is
the master's.

If the model is in stages which copy themselves (mode pipeline), such a copy of the next step is written instead, stage
by stage (``parts_checkpoint``); nothing is copied between two steps.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from everstep import faultpoints
from everstep.allreduce.member_runtime import MemberRuntime
from everstep.allreduce.parts_checkpoint import (
    CopiesToPersist,
    HeldParts,
    WrittenPart,
    check_part,
    index_of,
    parameters_in,
    read_index,
    together,
)
from everstep.allreduce.serialize import SerializedState, Unpacker
from everstep.allreduce.state import ReplicaState
from everstep.brain.events import Refused, ReplicaWritten
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError, EverstepError, StorageError
from everstep.machines.idle_slot import Budget, IdleSlot
from everstep.model.group import Position
from everstep.model.snapshot import CheckpointFile, Manifest, ReplicaCopy
from everstep.net.messages import TakeReplica
from everstep.net.retry import Deadline, backoff, retry
from everstep.protect.home_files import MODEL, HomeLink, HomePlace, place_opener
from everstep.protect.manifest import ManifestTrust, list_checkpoints, read_manifest, reading
from everstep.protect.model import model_folder, too_large
from everstep.protect.replicafile import WRITE_BYTES, ReplicaHead, read_replica_file, write_replica_file
from everstep.protect.sources import own_url
from everstep.storage.places import StoragePlace

WRITE_S = 120.0  # a place that does not take the file is tried again for so long
SHARE = 0.25  # of a step's time: what writing a checkpoint that nobody waits for may cost in it (processor time)
SILENT_S = 0.5  # without a step for so long, the writer goes on as if there had been one
_LOOK_S = 0.05  # between two looks for a copy of the stages
PACED_S = 10.0  # so much later than at full speed a checkpoint is complete at most
TELL_S = 300.0  # for the last steps to be committed everywhere and journaled, and for a master to be there

logger = logging.getLogger("everstep.worker")


class Copied(NamedTuple):
    """Is a snapshot to be written: the fields of ``ReplicaCopy`` that are known when it is taken."""

    serialized: SerializedState
    position: Position
    numbers: int
    waits_in: int
    waits_from: int


class ReplicaWriter:
    """``boundary`` is for the thread that trains; ``order`` and ``committed_everywhere`` for any. One checkpoint at a
    time."""

    def __init__(self, state: ReplicaState, runtime: MemberRuntime) -> None:
        self._state, self._runtime = state, runtime
        self.lineage = 0
        self.copies: CopiesToPersist | None = None  # what stages copy of themselves
        self._copy_of = -1  # the step whose copy is waited for, before it is written
        self._next = 0  # the step that was begun last
        self._plain = 0  # number of the checkpoint that no copy could be had for
        self._parts: tuple[int, tuple[WrittenPart, ...]] = (0, ())  # the newest checkpoint in parts, and its files
        self.saved: Position | None = None  # of the newest one that the master took
        self._lock = threading.Condition()
        self._order: TakeReplica | None = None
        self._busy = 0  # number of the one being written
        self._reported: dict[int, ReplicaCopy] = {}  # the last one that was taken: said again when ordered again
        self._committed_everywhere = 0
        self._spare: torch.Tensor | None = None
        self._closed = False
        self._slot = IdleSlot()
        self._stepped_at = 0.0  # the last boundary, monotonic seconds

    def __repr__(self) -> str:
        return f"<ReplicaWriter {f'writing {self._busy}' if self._busy else 'idle'}>"

    def order(self, order: TakeReplica) -> None:
        """Take an order from the master; it may come again."""
        with self._lock:
            if order.checkpoint != self._busy:
                self._order = order
            elif not order.idle:
                self._slot.unlimited = True  # somebody waits for it now
                self._lock.notify_all()

    def committed_everywhere(self, step: int) -> None:
        """Every member has committed all steps before ``step``."""
        if step != self._committed_everywhere:
            with self._lock:
                self._committed_everywhere = step
                self._lock.notify_all()

    def boundary(self, trained: bool = True) -> None:
        """The state is that of its position: copy it, if it is wanted. ``trained``: a step is over; else nothing is
        trained, and a copy of the next step may never come. Raises ScriptError: it cannot be saved."""
        now = time.monotonic()
        since_s, self._stepped_at = now - self._stepped_at, now
        if self._busy:
            self._offer(since_s)
            if self._copy_of >= 0 and not trained:
                self._no_copy()
        order = self._order
        if order is None or self._busy or (trained and self._may_copy(order)):
            return
        with self._lock:
            order, self._order = self._order, None
            into, self._spare = self._spare, None
            if order is None:
                return
            self._busy = order.checkpoint
            self._slot = IdleSlot()
            self._slot.unlimited = not order.idle
        again = self._reported.get(order.checkpoint)
        serialized = self._state.snapshot(into) if again is None else SerializedState(b"", torch.empty(0))
        position, numbers = self._state.position, sum(p.numel() for _, p in self._state.parameters())
        copied = Copied(serialized, position, numbers, *self._state.waits)

        def over() -> None:
            if again is None:
                self._spare = serialized.body

        self._start(order, lambda: again or self._write_whole(order, copied), over)

    def _start(self, order: TakeReplica, write: Callable[[], ReplicaCopy | None], over: Callable[[], None]) -> None:
        threading.Thread(target=self._work, args=(order, write, over), name="everstep-checkpoint", daemon=True).start()

    # ------------------------------------------------------------ from copies of the stages

    def _may_copy(self, order: TakeReplica) -> bool:
        return (
            self.copies is not None
            and order.copies
            and not order.model
            and order.checkpoint != self._plain
            and order.checkpoint not in self._reported
        )

    def next_step(self, step: int) -> bool:
        """Step ``step`` is about to begin: return whether a checkpoint is to be written from its copy. For the thread
        that trains."""
        self._next = step
        copies = self.copies
        if copies is None or self._order is None or self._busy or not self._may_copy(self._order):
            return False
        if not copies.begin(step):
            self.copies = None
            return False
        with self._lock:
            order, self._order = self._order, None
            if order is None:
                return False
            self._busy, self._copy_of = order.checkpoint, step
            self._slot = IdleSlot()
            self._slot.unlimited = not order.idle
        self._start(order, lambda: self._write_copy(order, copies, step), copies.release)
        return True

    def _no_copy(self) -> None:
        with self._lock:
            self._copy_of = -1
            self._lock.notify_all()

    def _await_copy(self, copies: CopiesToPersist, step: int) -> HeldParts | None:
        """Return the copy of ``step``; None: there will be none. Raises CheckpointError."""
        with self._lock:
            while not self._closed and self._copy_of == step:
                found = copies.find(step)
                if found is not None or self._next > step + 1:  # (all stages have left the step behind them)
                    self._copy_of = -1
                    return found
                self._lock.wait(_LOOK_S)
        return None

    def _write_copy(self, order: TakeReplica, copies: CopiesToPersist, step: int) -> ReplicaCopy | None:
        """Return None if there is no copy: the state is then copied between two steps. Raises EverstepError."""
        held = self._await_copy(copies, step)
        if held is None:
            logger.info("checkpoint %d: no whole copy of step %d; the state is copied itself", order.checkpoint, step)
            with self._lock:
                self._plain = order.checkpoint
                self._order = self._order or order
            return None
        size = sum(part.body.nbytes for part in held.parts)
        if 0 < order.limit_bytes < size:
            raise StorageError(too_large(size), passing=False)
        known = self._parts[1] if self._parts[0] == order.since else ()
        written: list[WrittenPart] = []
        pacer = self._pacer()
        for stage, part in enumerate(held.parts):
            for at in range(0, part.body.nbytes, WRITE_BYTES):
                pacer(min(WRITE_BYTES, part.body.nbytes - at))
                copies.check(held, stage, at, min(at + WRITE_BYTES, part.body.nbytes))
            body = part.body.data
            if stage < len(known) and _unchanged(known[stage], part.sums, body, pacer):
                written.append(known[stage])
                continue
            head = self._head(order, held.position, 0, len(body))
            file = self._write(order, head, b"", body, f"-stage{stage}", pacer)
            written.append(WrittenPart(file, head, part.sums))
            faultpoints.reach("part")
        index = index_of(held, tuple(written))
        file = self._write(order, self._head(order, held.position, len(index), 0), index, memoryview(b""), "", pacer)
        if not copies.intact(step):
            raise CheckpointError("the state that it is of was lost meanwhile")
        self._parts = order.checkpoint, tuple(written)
        return ReplicaCopy(
            position=held.position,
            file=file,
            lineage=held.lineage,
            parameters=parameters_in(held),
            parts=tuple(one.file for one in written),
        )

    def _offer(self, step_s: float) -> None:
        """Offer to the thread that writes its share of a step that took so long. (Of a long one it had the most
        already.)"""
        if step_s > 0:
            with self._lock:
                self._slot.offer(Budget(seconds=SHARE * min(step_s, SILENT_S)))
                self._lock.notify_all()

    @property
    def idle(self) -> bool:
        return not self._busy and self._order is None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    # ------------------------------------------------------------ the thread

    def _work(self, order: TakeReplica, write: Callable[[], ReplicaCopy | None], over: Callable[[], None]) -> None:
        """Write what is wanted, and tell. ``over``: called when the memory that it was in is free."""
        try:
            error, snapshot = "", None
            began = time.monotonic()
            try:
                snapshot = write()
                if snapshot is None:
                    return
                faultpoints.reach("checkpoint")
                took_s, size = time.monotonic() - began, snapshot.written_bytes(order.checkpoint)
                logger.info("checkpoint %d: %d bytes in %.3f s", order.checkpoint, size, took_s)
            except EverstepError as failed:
                error = str(failed)
            finally:
                with self._lock:
                    over()
            if snapshot is None or self._wait_committed_everywhere(snapshot.position):
                self._tell(order.checkpoint, snapshot, error)
        except EverstepError as failed:
            logger.warning("checkpoint %d: %s", order.checkpoint, failed)
        finally:
            with self._lock:
                self._busy, self._copy_of = 0, -1
                self._lock.notify_all()

    def _write_whole(self, order: TakeReplica, copied: Copied) -> ReplicaCopy:
        """Raises EverstepError."""
        serialized, position = copied.serialized, copied.position
        size = serialized.body.numel()
        if 0 < order.limit_bytes < size:
            raise StorageError(too_large(size), passing=False)
        head = self._head(order, position, len(serialized.header), size)
        file = self._write(order, head, serialized.header, serialized.body.numpy().data)
        if order.model:
            self._leave_model(order, serialized, position)
        return ReplicaCopy(
            position=position,
            file=file,
            lineage=self.lineage,
            parameters=copied.numbers,
            waits_in=copied.waits_in,
            waits_from=copied.waits_from,
        )

    def _pacer(self) -> Callable[[int], None]:
        """Return what the writing thread calls before each piece: waits until the slots of steps have room for it. Time
        in which the thread waits for a disk or a network costs training nothing, and is not counted."""
        piece, cpu_s, end = 0, time.thread_time(), Deadline(PACED_S)

        def before(size: int) -> None:
            nonlocal piece, cpu_s
            with self._lock:
                slot = self._slot
                slot.spent(piece, time.thread_time() - cpu_s)
                while not (self._closed or end.expired or self._lock.wait_for(lambda: self._may(size), SILENT_S)):
                    slot.offer(Budget(seconds=SHARE * SILENT_S))
            piece, cpu_s = size, time.thread_time()

        return before

    def _may(self, size: int) -> bool:
        return self._closed or self._slot.claim(size, size) > 0

    def _leave_model(self, order: TakeReplica, serialized: SerializedState, position: Position) -> None:
        """Raises StorageError, ConfigError, PlatformError."""
        link = self._runtime.home_link() if "://" not in order.model else None
        with model_folder(order.model, HomePlace(link, MODEL) if link is not None else None) as folder:
            found = state_dicts(serialized, f"the state of step {position.step}")
            write_state(found, folder, {"job": self._runtime.spec.name, "step": str(position.step)})

    def _head(self, order: TakeReplica, position: Position, header_bytes: int, body_bytes: int) -> ReplicaHead:
        return ReplicaHead(
            job=self._runtime.spec.name,
            checkpoint=order.checkpoint,
            position=position,
            header_bytes=header_bytes,
            body_bytes=body_bytes,
        )

    def _write(
        self,
        order: TakeReplica,
        head: ReplicaHead,
        header: bytes,
        body: memoryview,
        ending: str = "",
        pacer: Callable[[int], None] | None = None,
    ) -> CheckpointFile:
        """Write a file, durable on return. ``ending``: of its name. Raises StorageError, ConfigError."""
        runtime = self._runtime
        token = secrets.token_hex(4)
        path = f"images/{order.checkpoint:06d}/replica-{runtime.slot}.{runtime.incarnation}-{token}{ending}.rep"
        before = pacer or self._pacer()
        deadline = Deadline(WRITE_S)
        place = place_opener(runtime.home_link(), runtime.spec)

        def wait(seconds: float) -> None:
            with self._lock:
                self._lock.wait_for(lambda: self._closed, seconds)

        def attempt() -> CheckpointFile:
            with place(order.url).create(path) as file:
                written = write_replica_file(file.write, head, header, body, before)
                file.commit()
            return msgspec.structs.replace(written, path=path)

        def again(error: StorageError) -> bool:
            if not error.passing or deadline.expired or self._closed:
                return False
            logger.warning("%s; trying again, training goes on", error)
            return True

        return retry(attempt, StorageError, again=again, first_s=0.2, limit_s=5.0, wait=wait)

    def _wait_committed_everywhere(self, position: Position) -> bool:
        with self._lock:
            return self._lock.wait_for(
                lambda: self._committed_everywhere >= position.step or self._closed, TELL_S
            ) and (self._committed_everywhere >= position.step)

    def _tell(self, checkpoint: int, snapshot: ReplicaCopy | None, error: str) -> None:
        runtime = self._runtime
        deadline = Deadline(TELL_S, "the master's answer about a checkpoint")
        for wait_s in backoff(0.05, 1.0):
            with self._lock:
                if self._lock.wait_for(lambda: self._closed, wait_s):
                    return
            deadline.check()
            answer = runtime.call(ReplicaWritten(checkpoint, snapshot, error), deadline.left_s)
            if not isinstance(answer, Refused):
                break
        if snapshot is not None:
            self._reported = {checkpoint: snapshot}
            self.saved = snapshot.position


def _unchanged(old: WrittenPart, sums: NDArray[np.uint32], body: memoryview, before: Callable[[int], None]) -> bool:
    """Return whether a stage's file has these bytes: by the checksums of its blocks, and then by its digest."""
    if old.head.body_bytes != len(body) or not np.array_equal(old.sums, sums):
        return False
    again = write_replica_file(lambda data: None, old.head, b"", body, before)
    return again.checksum == old.file.checksum


# ---------------------------------------------------------------- back


def find_replica(
    spec: JobSpec, run_dir: Path, checkpoint: int, key: bytes, home: HomeLink | None = None
) -> tuple[StoragePlace, Manifest]:
    """Find this job's own checkpoint, or that of the one it goes on from (numbers are never used twice). ``key``: see
    ``protect.sources.SnapshotSources``. ``home``: to the first node, where the directories are; None: they are here.
    Raises CheckpointError, StorageError."""
    places = place_opener(home, spec)
    trust = ManifestTrust(key=key, digests=spec.trusted)
    urls = [url for url in dict.fromkeys((own_url(spec, run_dir), spec.resume_from)) if url]
    for url in urls:
        place = places(url)
        if checkpoint in list_checkpoints(place):
            return place, read_manifest(place, checkpoint, trust)
    raise CheckpointError(f"checkpoint {checkpoint} is not in {' nor in '.join(urls)}")


def read_replica(place: StoragePlace, manifest: Manifest) -> SerializedState:
    """Return all of it, checked. Raises CheckpointError (of tables; damaged), StorageError."""
    if manifest.replica is None:
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} of {place.url} is of mode ps: it has tables, no replica"
        )
    replica = manifest.replica
    if not replica.parts:
        return _read_file(place, replica.file, f"checkpoint {manifest.checkpoint} is that file")[1]
    needed = f"checkpoint {manifest.checkpoint} needs that file"
    _, read = _read_file(place, replica.file, needed)
    what = f"{place.url}/{replica.file.path}"
    index = read_index(read.header, len(replica.parts), what)
    bodies = []
    for stage, file in enumerate(replica.parts):
        head, part = _read_file(place, file, needed)
        check_part(head, index, stage, f"{place.url}/{file.path}")
        bodies.append(part.body)
    return together(index, bodies, what)


def _read_file(place: StoragePlace, file: CheckpointFile, needed: str) -> tuple[ReplicaHead, SerializedState]:
    where = f"{place.url}/{file.path}"
    with reading(place, file, needed) as stream:
        parts = read_replica_file(stream, where, file)
        head = next(parts)
        assert isinstance(head, ReplicaHead)
        if head.header_bytes + head.body_bytes > file.size_bytes:
            raise CheckpointError(f"{where} says it holds more than its {file.size_bytes} bytes")
        header = bytearray(head.header_bytes)
        body = torch.empty(head.body_bytes, dtype=torch.uint8)
        into, at = body.numpy().data, -head.header_bytes
        for part in parts:
            assert isinstance(part, bytes)
            if at < 0:
                header[at + head.header_bytes : at + head.header_bytes + len(part)] = part
            else:
                into[at : at + len(part)] = part
            at += len(part)
    return head, SerializedState(bytes(header), body)


def state_dicts(serialized: SerializedState, what: str) -> dict[str, Any]:
    """Return the state as plain dicts, with torch.distributed.checkpoint's convention for optimizers (parameters by
    their fully qualified names): {"model": ..., "optimizers": [...], "tracked": {...}, "step": ..., "epoch": ...,
    "position": ...}. Raises CheckpointError."""
    try:
        return _state_dicts(serialized, what)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{what} is not built as a state is: {type(error).__name__}: {why}") from None


def _state_dicts(serialized: SerializedState, what: str) -> dict[str, Any]:
    unpacker = Unpacker(serialized, what)
    header = unpacker.header
    optimizers: list[Any] = []
    tracked: dict[str, Any] = {}
    for name, tree in header.trees.items():
        if name.startswith("tracked."):
            tracked[name.removeprefix("tracked.")] = unpacker.value(tree)
        elif name.startswith("optimizer"):
            groups = [{"params": g["names"], **unpacker.value(g["values"])} for g in tree["groups"]]
            state = {name: unpacker.value(values) for name, values in (*tree["state"], *tree["other"])}
            optimizers.append({"state": state, "param_groups": groups})
    return {
        "model": {unpacker.name(n): unpacker.copy(n) for n in (*header.parameters, *header.buffers)},
        "optimizers": optimizers,
        "tracked": tracked,
        **msgspec.structs.asdict(header.position),
    }


def export_replica(place: StoragePlace, manifest: Manifest, out: Path, tell: Callable[[str], None]) -> None:
    """Write ``out/model.safetensors``: the model's state_dict; ``out/training.pt``: the optimizers' and the rest, for
    ``torch.load(path, weights_only=True)``. Raises CheckpointError, StorageError, OSError."""
    found = state_dicts(read_replica(place, manifest), f"checkpoint {manifest.checkpoint}")
    tensors = len(found["model"])
    about = {"everstep_checkpoint": str(manifest.checkpoint), "job": manifest.job, "step": str(found["step"])}
    write_state(found, out, about)
    tell(f"{out / 'model.safetensors'}: {tensors} tensors")
    tell(f"{out / 'training.pt'}: optimizers and the rest")


def write_state(found: dict[str, Any], out: Path, about: dict[str, str]) -> None:
    """Write what ``state_dicts`` returned, as the two files of ``export_replica``. Raises OSError."""
    from safetensors.torch import save_file

    model = found.pop("model")
    out.mkdir(parents=True, exist_ok=True)
    for name, write in (
        ("model.safetensors", lambda path: save_file({k: v.contiguous() for k, v in model.items()}, path, about)),
        ("training.pt", lambda path: torch.save(found, path)),
    ):
        temporary = out / f".{name}.tmp"
        try:
            write(temporary)
            temporary.replace(out / name)
        finally:
            temporary.unlink(missing_ok=True)
