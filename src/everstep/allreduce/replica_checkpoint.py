"""Checkpoints of the training state: the leader writes a snapshot while training goes on; anybody loads it.

The thread that trains only copies the state (at a boundary of two steps): script and optimizers may change any of it
from then on. Another thread does the larger part, checksums and files, in the idle slots of the steps that follow
(``machines.idle_slot``), so that no single step lends it the processors for all of that. It writes where the job's
checkpoints lie, and tells the master once all members have committed every step before its position. The manifest is
the master's.
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
import torch

from everstep import faultpoints
from everstep.allreduce.member_runtime import MemberRuntime
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
from everstep.protect.manifest import ManifestTrust, list_checkpoints, read_manifest, reading
from everstep.protect.model import model_folder, too_large
from everstep.protect.replicafile import ReplicaHead, read_replica_file, write_replica_file
from everstep.protect.sources import own_url
from everstep.storage.places import StoragePlace, open_place

WRITE_S = 120.0  # a place that does not take the file is tried again for so long
SHARE = 0.25  # of a step's time: what writing a checkpoint that nobody waits for may cost in it (processor time)
SILENT_S = 0.5  # without a step for so long, the writer goes on as if there had been one
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

    def boundary(self) -> None:
        """The state is that of its position: copy it, if it is wanted. Raises ScriptError: it cannot be saved."""
        now = time.monotonic()
        since_s, self._stepped_at = now - self._stepped_at, now
        if self._busy:
            self._offer(since_s)
        if self._order is None or self._busy:
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
        threading.Thread(
            target=self._work, args=(order, copied, again), name="everstep-checkpoint", daemon=True
        ).start()

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

    def _work(self, order: TakeReplica, copied: Copied, again: ReplicaCopy | None) -> None:
        serialized, position = copied.serialized, copied.position
        try:
            error, snapshot = "", again
            if snapshot is None:
                began = time.monotonic()
                try:
                    if 0 < order.limit_bytes < serialized.body.numel():
                        raise StorageError(too_large(serialized.body.numel()), passing=False)
                    file = self._write(order, serialized, position)
                    if order.model:
                        self._leave_model(order, serialized, position)
                    snapshot = ReplicaCopy(
                        position=position,
                        file=file,
                        lineage=self.lineage,
                        parameters=copied.numbers,
                        waits_in=copied.waits_in,
                        waits_from=copied.waits_from,
                    )
                    faultpoints.reach("checkpoint")
                    took_s = time.monotonic() - began
                    logger.info("checkpoint %d: %d bytes in %.3f s", order.checkpoint, file.size_bytes, took_s)
                except EverstepError as failed:
                    error = str(failed)
            if snapshot is None or self._wait_committed_everywhere(snapshot.position):
                self._tell(order.checkpoint, snapshot, error)
        except EverstepError as failed:
            logger.warning("checkpoint %d: %s", order.checkpoint, failed)
        finally:
            with self._lock:
                self._busy = 0
                if again is None:
                    self._spare = serialized.body
                self._lock.notify_all()

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
        with model_folder(order.model) as folder:
            found = state_dicts(serialized, f"the state of step {position.step}")
            write_state(found, folder, {"job": self._runtime.spec.name, "step": str(position.step)})

    def _write(self, order: TakeReplica, serialized: SerializedState, position: Position) -> CheckpointFile:
        """Write the file, durable on return. Raises StorageError, ConfigError."""
        runtime = self._runtime
        head = ReplicaHead(
            job=runtime.spec.name,
            checkpoint=order.checkpoint,
            position=position,
            header_bytes=len(serialized.header),
            body_bytes=serialized.body.numel(),
        )
        token = secrets.token_hex(4)
        path = f"images/{order.checkpoint:06d}/replica-{runtime.slot}.{runtime.incarnation}-{token}.rep"
        deadline = Deadline(WRITE_S)

        def wait(seconds: float) -> None:
            with self._lock:
                self._lock.wait_for(lambda: self._closed, seconds)

        def attempt() -> CheckpointFile:
            with open_place(order.url).create(path) as file:
                body = serialized.body.numpy().data
                written = write_replica_file(file.write, head, serialized.header, body, self._pacer())
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


# ---------------------------------------------------------------- back


def find_replica(spec: JobSpec, run_dir: Path, checkpoint: int, key: bytes) -> tuple[StoragePlace, Manifest]:
    """Find this job's own checkpoint, or that of the one it goes on from (numbers are never used twice). ``key``: see
    ``protect.sources.SnapshotSources``. Raises CheckpointError, StorageError."""
    trust = ManifestTrust(key=key, digests=spec.trusted)
    urls = [url for url in dict.fromkeys((own_url(spec, run_dir), spec.resume_from)) if url]
    for url in urls:
        place = open_place(url)
        if checkpoint in list_checkpoints(place):
            return place, read_manifest(place, checkpoint, trust)
    raise CheckpointError(f"checkpoint {checkpoint} is not in {' nor in '.join(urls)}")


def read_replica(place: StoragePlace, manifest: Manifest) -> SerializedState:
    """Return all of it, checked. Raises CheckpointError (of tables; damaged), StorageError."""
    if manifest.replica is None:
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} of {place.url} is of mode ps: it has tables, no replica"
        )
    file = manifest.replica.file
    where = f"{place.url}/{file.path}"
    with reading(place, file, f"checkpoint {manifest.checkpoint} is that file") as stream:
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
    return SerializedState(bytes(header), body)


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
