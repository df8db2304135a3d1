"""Manifests: a checkpoint exists when, and only when, its manifest does.

``manifest-000012.json`` in a place is the JSON of a ``Manifest`` and a last line with the checksum of all before it. It
is written last and at once, after every file that it names is durable. The newest one that is intact, and whose files
are, wins.

The JSON ends with a code (HMAC-SHA256) by the key of the job: whoever cannot read the job's secret cannot write a
manifest that this job, or one that goes on from it, takes for its own; nor other files, whose digests are in it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.bounds import MALFORMED
from everstep.config.load import read_spec
from everstep.errors import CheckpointError, StorageError, UntrustedError
from everstep.model.snapshot import (
    MANIFEST_VERSION,
    PARTS_VERSION,
    REPLICA_VERSION,
    CheckpointFile,
    Manifest,
    PartitionSnapshot,
)
from everstep.policies.retention import unneeded_files
from everstep.protect.replicafile import read_replica_file
from everstep.protect.snapshot_file import (
    MarksBlob,
    PageLayout,
    Pages,
    Rows,
    SnapshotFileWriter,
    SnapshotHead,
    checksum,
    read_snapshot_file,
)
from everstep.storage.places import StoragePlace, open_place

MANIFEST_MAX_BYTES = 256 << 20
CHECKPOINTS = "checkpoints"
"""Under the run directory, unless the job says another place."""

_NAME = re.compile(r"manifest-(\d{6,})\.json")
_SNAPSHOT = re.compile(r"images/(\d{6,})/\.?(?:bucket|replica)-")
_DELETABLE = re.compile(r"images/[0-9]{6,}/\.?(?:bucket|replica)-[A-Za-z0-9._-]+")
_SUM = b"blake2b-128 "
_CODE = re.compile(rb',"code":"([0-9a-f]{64})"\}\n\Z')
_manifest_decoder = msgspec.json.Decoder(Manifest)


class _ManifestVersion(msgspec.Struct):
    version: int


_version_decoder = msgspec.json.Decoder(_ManifestVersion)


def manifest_name(checkpoint: int) -> str:
    return f"manifest-{checkpoint:06d}.json"


def checkpoint_place(where: str | Path) -> StoragePlace:
    """Return the place of a run directory's checkpoints, or the directory or URL itself. Raises ConfigError."""
    text = str(where)
    if "://" not in text and (Path(text) / "job.json").exists():
        return open_place(checkpoints_of(Path(text)))
    return open_place(text)


def checkpoints_of(run_dir: Path) -> str:
    """Return where a job keeps its checkpoints: directory or URL. Raises ConfigError: not a run directory."""
    return read_spec(run_dir).checkpoint_to or str(run_dir / CHECKPOINTS)


# ---------------------------------------------------------------- bytes


class ManifestTrust(msgspec.Struct, frozen=True, kw_only=True):
    """Says which manifests may be loaded: those with a code by ``key`` (empty: there is none), and those whose bytes
    have one of these ``digests`` (see ``digest_of``): what a user said to trust. ``anything``: the user says so now."""

    key: bytes = b""
    digests: tuple[str, ...] = ()
    anything: bool = False

    def __repr__(self) -> str:
        return f"<Trust {'a key' if self.key else 'no key'}, {len(self.digests)} digests>"  # never in a log

    def authentic(self, data: bytes) -> bool:
        """Return whether these bytes of a manifest were written by who has the key."""
        body = data[:-45]  # (without the line of the checksum)
        found = _CODE.search(body)
        if not self.key or found is None:
            return False
        return hmac.compare_digest(found[1], _code(body[: found.start()], self.key))

    def check(self, data: bytes, name: str) -> None:
        """UntrustedError, one line that begins with ``name``: it may not be loaded."""
        if self.anything or self.authentic(data) or digest_of(data) in self.digests:
            return
        what = "has no code: an older everstep, or a stranger, wrote it"
        if is_coded(data):
            what = "was not written with this job's key: name the run directory it comes from, or that one's --secret"
        raise UntrustedError(
            f"{name} {what}; --trust-checkpoint loads it all the same, if you trust whoever can write there"
        )


def is_coded(data: bytes) -> bool:
    """Return whether these bytes of a manifest have a code, by whichever key."""
    return _CODE.search(data[:-45]) is not None


def digest_of(data: bytes) -> str:
    """Of a manifest's bytes: by it one says exactly which one is meant."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _code(text: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"everstep manifest\n" + text, hashlib.sha256).hex().encode()


def encode_manifest(manifest: Manifest, key: bytes = b"") -> bytes:
    """``key``: of the job that writes it, see ``Secret.checkpoint_key``; empty: without a code."""
    data = msgspec.json.encode(manifest) + b"\n"
    if key:
        text = data[:-2]  # (without the last brace)
        data = text + b',"code":"' + _code(text, key) + b'"}\n'
    hashed = checksum()
    hashed.update(data)
    return data + _SUM + hashed.hexdigest().encode() + b"\n"


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Decode a manifest; CheckpointError, one line that begins with ``name``: cut, changed, of a newer version."""
    body, line = data[:-45], data[-45:]
    if not line.startswith(_SUM) or not line.endswith(b"\n") or not body.endswith(b"\n"):
        raise CheckpointError(f"{name} was cut or changed: it does not end with its checksum")
    hashed = checksum()
    hashed.update(body)
    if line[len(_SUM) : -1] != hashed.hexdigest().encode():
        raise CheckpointError(f"{name} was changed: its checksum is wrong")
    try:
        version = _version_decoder.decode(body).version
        if version not in (MANIFEST_VERSION, REPLICA_VERSION, PARTS_VERSION):
            raise CheckpointError(
                f"{name} is of version {version}, this everstep reads version {PARTS_VERSION}: install a newer one"
            )
        return _manifest_decoder.decode(body)
    except MALFORMED as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from None


# ---------------------------------------------------------------- in a place


def write_manifest(place: StoragePlace, manifest: Manifest, key: bytes = b"") -> None:
    """Durable on return: from here on the checkpoint exists. ``key``: see ``encode_manifest``. Raises StorageError."""
    place.put(manifest_name(manifest.checkpoint), encode_manifest(manifest, key))


def list_checkpoints(place: StoragePlace) -> list[int]:
    """Return the numbers that have a manifest, ascending, whatever is in it. Raises StorageError."""
    return sorted(int(m[1]) for name in place.names() if (m := _NAME.fullmatch(name)))


def need_checkpoints(place: StoragePlace) -> list[int]:
    """Return as ``list_checkpoints`` does; CheckpointError if there is none."""
    found = list_checkpoints(place)
    if not found:
        raise CheckpointError(f"{place.url} holds no checkpoint: there is no {manifest_name(1)} or later one in it")
    return found


def read_bytes(place: StoragePlace, checkpoint: int) -> bytes:
    """Return the bytes of the manifest, as they are. Raises CheckpointError (not there), StorageError (cannot be
    read)."""
    name = manifest_name(checkpoint)
    try:
        return place.read(name, MANIFEST_MAX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{place.url} has no checkpoint {checkpoint}: {name} is not there") from None


def read_manifest(place: StoragePlace, checkpoint: int, trust: ManifestTrust | None = None) -> Manifest:
    """Read a manifest; ``trust``: what may be loaded; None: it is only looked at. Raises CheckpointError (not there,
    not intact), UntrustedError, StorageError (cannot be read)."""
    name = manifest_name(checkpoint)
    data = read_bytes(place, checkpoint)
    manifest = decode_manifest(data, f"{place.url}/{name}")
    if trust is not None:
        trust.check(data, f"{place.url}/{name}")
    if manifest.checkpoint != checkpoint:
        raise CheckpointError(f"{place.url}/{name} is the manifest of checkpoint {manifest.checkpoint}")
    return manifest


@contextmanager
def reading(place: StoragePlace, file: CheckpointFile, needed: str) -> Iterator[BinaryIO]:
    """Yield the file to read from. Raises CheckpointError if it is not there (``needed``: what needs it),
    StorageError."""
    try:
        with place.open(file.path) as stream:
            yield stream
    except FileNotFoundError:
        raise CheckpointError(f"{place.url}/{file.path} is missing: {needed}") from None


def problems(
    place: StoragePlace,
    manifest: Manifest,
    *,
    deep: bool = True,
    sizes: dict[str, int] | None = None,
    known: dict[CheckpointFile, str] | None = None,
) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, a line for each offender; nothing: it is complete and intact.

    ``deep``: every byte is read and compared with its checksums; else only the files' presence and length.
    ``sizes``: of the place's files, if the caller has them. ``known``: what was found about files before ("": intact),
    filled here; manifests share files. Raises StorageError: the place cannot be read.
    """
    sizes = place.sizes() if sizes is None else sizes
    known = {} if known is None else known
    if manifest.replica is not None:
        for file in manifest.replica.files:
            if file not in known or not deep:
                known[file] = _replica_problem(place, manifest, file, sizes, deep)
            if known[file]:
                yield known[file]
        if not manifest.snapshots:
            return
    yield from _incomplete(manifest)
    for snapshot in manifest.snapshots:
        for i, file in enumerate(snapshot.files):
            if file not in known or not deep:
                known[file] = _file_problem(place, manifest, snapshot, i, sizes, deep)
            if known[file]:
                yield known[file]


def _incomplete(manifest: Manifest) -> Iterator[str]:
    name = manifest_name(manifest.checkpoint)
    have = [snapshot.partition for snapshot in manifest.snapshots]
    missing = sorted(set(range(manifest.partitions)) - set(have))
    if missing:
        yield f"{name} has no snapshot of partition{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}" + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
    if len(set(have)) != len(have):
        yield f"{name} has two snapshots of a partition"
    for snapshot in manifest.snapshots:
        if not snapshot.files:
            yield f"{name}: the snapshot of partition {snapshot.partition} has no files"


def _replica_problem(
    place: StoragePlace, manifest: Manifest, file: CheckpointFile, sizes: dict[str, int], deep: bool
) -> str:
    where = f"{place.url}/{file.path}"
    replica = manifest.replica
    verb = "needs" if replica is not None and replica.parts else "is"
    needed = f"checkpoint {manifest.checkpoint} {verb} that file"
    wrong = _size_problem(where, file, sizes, needed)
    if wrong or not deep:
        return wrong
    try:
        with reading(place, file, needed) as stream:
            for _ in read_replica_file(stream, where, file):
                pass
    except CheckpointError as error:
        return str(error)
    return ""


def _size_problem(where: str, file: CheckpointFile, sizes: dict[str, int], needed: str) -> str:
    size = sizes.get(file.path)
    if size is None:
        return f"{where} is missing: {needed}"
    if size != file.size_bytes:
        how = "it was cut" if size < file.size_bytes else "it is longer"
        return f"{where} has {size} bytes, not the {file.size_bytes} that the manifest says: {how}"
    return ""


def _file_problem(
    place: StoragePlace, manifest: Manifest, snapshot: PartitionSnapshot, i: int, sizes: dict[str, int], deep: bool
) -> str:
    file = snapshot.files[i]
    where = f"{place.url}/{file.path}"
    needed = f"checkpoint {manifest.checkpoint} needs it for partition {snapshot.partition}"
    wrong = _size_problem(where, file, sizes, needed)
    if wrong or not deep:
        return wrong
    try:
        with reading(place, file, needed) as stream:
            for part in read_snapshot_file(stream, where, file):
                if isinstance(part, SnapshotHead) and (part.partition, part.full) != (snapshot.partition, i == 0):
                    what = "full snapshot" if part.full else "incremental snapshot"
                    expected = f"file {i} of partition {snapshot.partition}"
                    return f"{where} is {what} of partition {part.partition}, not {expected}"
    except CheckpointError as error:
        return str(error)
    return ""


def latest_intact(
    place: StoragePlace,
    *,
    deep: bool = True,
    tell: Callable[[str], None] | None = None,
    trust: ManifestTrust | None = None,
    also: Callable[[Manifest], Iterator[str]] | None = None,
    below: int = 0,
) -> Manifest:
    """Return the newest checkpoint that is complete and intact; ``tell`` gets a line for each newer one that is not.

    ``deep``: every byte is read; without it a flipped bit is found later, when its partition is loaded. ``trust``: what
    may be loaded. ``also``: more that may be wrong with one. ``below``: only those with a smaller number (0: all).
    Raises CheckpointError: there is none. StorageError: the place cannot be read.
    """
    first = ""
    sizes = place.sizes()
    known: dict[CheckpointFile, str] = {}
    for checkpoint in reversed(need_checkpoints(place)):
        if below and checkpoint >= below:
            continue
        try:
            manifest = read_manifest(place, checkpoint, trust)
            wrong = next(problems(place, manifest, deep=deep, sizes=sizes, known=known), "")
            wrong = wrong or (next(also(manifest), "") if also is not None else "")
        except CheckpointError as error:
            wrong = str(error)
        if not wrong:
            return manifest
        first = first or wrong
        if tell is not None:
            tell(f"checkpoint {checkpoint} is left out: {wrong}")
    if not first:
        raise CheckpointError(f"{place.url} has no checkpoint older than {below}")
    raise CheckpointError(f"{place.url} has no checkpoint that is complete and intact; of the newest: {first}")


def drop_checkpoints(place: StoragePlace, checkpoints: Collection[int]) -> int:
    """Deletes these checkpoints, and every snapshot that no other one needs; how many snapshots went. Also goes what is
    left of checkpoints that were begun before the newest one and given up. Manifests go first: a checkpoint is there or
    not, never without its files. Harmless when repeated. Raises StorageError.
    """
    gone: list[Manifest] = []
    kept: list[Manifest] = []
    for checkpoint in list_checkpoints(place):
        try:
            (gone if checkpoint in checkpoints else kept).append(read_manifest(place, checkpoint))
        except CheckpointError:
            if checkpoint not in checkpoints:
                return 0  # whose files are whose cannot be told: nothing goes
    for checkpoint in sorted(checkpoints):
        place.delete(manifest_name(checkpoint))
    files = unneeded_files(gone, kept) | _left_over(place, kept)
    for path in sorted(files):
        _delete_snapshot(place, path)
    return len(files)


def _delete_snapshot(place: StoragePlace, path: str) -> None:
    """Delete a file of a snapshot; whatever manifests say, nothing else of the place, and nothing outside of it."""
    if not _DELETABLE.fullmatch(path):
        raise StorageError(f"{place.url}: {path!r} is no file of a checkpoint: nothing is deleted", passing=False)
    place.delete(path)


def _left_over(place: StoragePlace, manifests: Collection[Manifest]) -> set[str]:
    """Snapshots that no manifest names, of checkpoints older than the newest: nobody will name them any more."""
    newest = max((m.checkpoint for m in manifests), default=0)
    named = {file.path for m in manifests for file in m.files()}
    found = ((path, _SNAPSHOT.match(path)) for path in place.sizes())
    return {path for path, of in found if of and int(of[1]) < newest and path not in named}


# ---------------------------------------------------------------- compaction


def compact(place: StoragePlace, manifest: Manifest, key: bytes = b"") -> Manifest:
    """Merges each partition's full and incremental snapshots into one full snapshot, without any ps, writes the
    manifest anew under its number (``key``: see ``encode_manifest``), then deletes the files that no checkpoint needs
    any more. Not for the newest checkpoint of a running job: its ps go on from the old files. Raises CheckpointError,
    StorageError.
    """
    snapshots = tuple(i if len(i.files) == 1 else _merged(place, manifest, i) for i in manifest.snapshots)
    if snapshots == manifest.snapshots:
        return manifest
    new = msgspec.structs.replace(manifest, snapshots=snapshots, since=0)
    write_manifest(place, new, key)
    try:
        kept = [read_manifest(place, number) for number in list_checkpoints(place)]
    except CheckpointError:
        return new  # whose files are whose cannot be told: all stay
    for path in sorted(unneeded_files([manifest], kept)):
        _delete_snapshot(place, path)
    return new


def _merged(place: StoragePlace, manifest: Manifest, snapshot: PartitionSnapshot) -> PartitionSnapshot:
    newest = snapshot.files[-1].checksum[:8]
    path = f"images/{manifest.checkpoint:06d}/bucket-{snapshot.partition:04d}-merged-{newest}.img"
    whole = assemble(place, snapshot)
    with place.create(path) as file:
        out = SnapshotFileWriter(file.write)
        out.head(msgspec.structs.replace(whole.head, full=True))
        out.marks(whole.marks)
        for table in whole.pages:
            for pages in whole.some(table):
                out.pages(table, pages.layout, pages.numbers, pages.data)
        out.end()
        file.commit()
    merged = out.checkpoint_file(path)
    return msgspec.structs.replace(snapshot, files=(merged,), bytes_written=merged.size_bytes)


class Assembled(NamedTuple):
    """Is a partition as its snapshot has it: head and marks of the newest file; pages by table and number, each uint8
    [page_bytes], without those that no row is in."""

    head: SnapshotHead
    marks: bytes
    layouts: dict[int, PageLayout]
    pages: dict[int, dict[int, NDArray[np.uint8]]]

    def some(self, table: int, most_bytes: int = 8 << 20) -> Iterator[Pages]:
        """Yield the pages of a table in ascending order, some megabytes at a time."""
        layout, pages = self.layouts[table], self.pages[table]
        numbers = sorted(pages)
        step = max(1, most_bytes // layout.page_bytes)
        for at in range(0, len(numbers), step):
            part = numbers[at : at + step]
            yield Pages(table, layout, part, np.stack([pages[n] for n in part]))


def assemble(place: StoragePlace, snapshot: PartitionSnapshot) -> Assembled:
    """Put a full snapshot and its incremental ones together, all checked before anything is returned; the whole
    partition is in memory. Raises CheckpointError (a file is missing, cut, changed, not of this partition),
    StorageError.
    """
    head: SnapshotHead | None = None
    marks = b""
    layouts: dict[int, PageLayout] = {}
    pages: dict[int, dict[int, NDArray[np.uint8]]] = {}
    for i, file in enumerate(snapshot.files):
        where = f"{place.url}/{file.path}"
        with reading(place, file, f"the snapshot of partition {snapshot.partition} needs it") as stream:
            for part in read_snapshot_file(stream, where, file):
                match part:
                    case SnapshotHead():
                        head = part
                        if part.partition != snapshot.partition or part.full != (i == 0):
                            raise CheckpointError(
                                f"{where} is not file {i} of the snapshot of partition {snapshot.partition}"
                            )
                    case MarksBlob():
                        marks = bytes(part)
                    case Pages() | Rows():
                        if layouts.setdefault(part.table, part.layout) != part.layout:
                            raise CheckpointError(f"{where}: pages of table {part.table} changed their layout")
                        of_table = pages.setdefault(part.table, {})
                        if isinstance(part, Pages):
                            of_table.update(zip(part.numbers, part.data, strict=True))
                        else:
                            _patch(of_table, part)
    if head is None or head.seq != snapshot.seq:
        raise CheckpointError(
            f"{place.url}: the files of partition {snapshot.partition} are not the snapshot of seq {snapshot.seq}"
        )
    for of_table in pages.values():
        for number in [n for n, page in of_table.items() if not page.any()]:
            del of_table[number]
    return Assembled(head, marks, layouts, pages)


def _patch(pages: dict[int, NDArray[np.uint8]], rows: Rows) -> None:
    """Puts the rows into their pages."""
    layout = rows.layout
    numbers = rows.slots >> np.uint32(layout.page_bits)
    order = np.argsort(numbers, kind="stable")
    ends = np.flatnonzero(np.diff(numbers[order], append=np.uint32(0xFFFFFFFF))) + 1
    begin = 0
    for end in ends.tolist():
        some = order[begin:end]
        begin = end
        number = int(numbers[some[0]])
        page = pages.get(number)
        if page is None:
            page = pages[number] = np.zeros(layout.page_bytes, np.uint8)
        one = page.reshape(1, -1)
        slots = (rows.slots[some] & np.uint32(layout.slots - 1)).astype(np.intp)
        used = layout.used(one)[0]
        used[slots] = rows.used[some]
        page[: layout.bitmap_bytes] = np.packbits(used, bitorder="little")
        layout.keys(one)[0][slots] = rows.keys[some]
        layout.records(one)[0][slots] = rows.records[some]


__all__ = [
    "CHECKPOINTS",
    "Assembled",
    "StorageError",
    "assemble",
    "checkpoint_place",
    "checkpoints_of",
    "compact",
    "decode_manifest",
    "drop_checkpoints",
    "encode_manifest",
    "latest_intact",
    "list_checkpoints",
    "manifest_name",
    "need_checkpoints",
    "problems",
    "read_manifest",
    "write_manifest",
]
