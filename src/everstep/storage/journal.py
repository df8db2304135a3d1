"""Keeps the master's durable event log: SQLite, WAL, synchronous=FULL, group commit.

One writer thread owns the database. Events that arrive while one transaction is being synced go into the next one
together, so a durable event costs a small part of an fsync. Beside each event stands a short digest of the
instructions that handling it gave: ``everstep replay`` checks them.

All events are kept, for ``replay``, ``explain`` and ``audit``: the file grows by about 60 bytes an event, that is
per shard a few hundred bytes and never per batch. Snapshots (the newest two are kept) only shorten a restart: what is
replayed on top of one is at most ``SNAPSHOT_EVERY`` events and what one group holds.

Two masters cannot both rule: opening for writing raises the incarnation stored in the file, and every transaction
first checks that it is still its own. An older master's next commit fails with ``FencedError``.

Tables: ``meta(key, value)``; ``events(seq, event, digest)``, msgpack of ``Event`` (of version 2: see
``brain.earlier``) and, in ``digest``, eight bytes for its instructions and eight that vouch for the row;
``snapshots(seq, state)``, the state followed by eight bytes that
vouch for it. Numbers have no gaps. So a changed bit is found by the reader, with SQLite's own check of its pages; what
cannot be told from a crash is a journal that lost its unsynced end.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.earlier import decode_event
from everstep.brain.events import Event, InstructionType
from everstep.brain.shapes import SHAPES_2, Shapes, in_shape, shapes_now
from everstep.errors import ConfigError, DeadlineError, EverstepError, FencedError, PlatformError
from everstep.ids import Incarnation
from everstep.storage.atomic import private
from everstep.storage.space import is_full, with_space
from everstep.storage.wal import WalFile

VERSION = 3
READS = (2, 3)
SNAPSHOT_EVERY = 20_000
GATHER_S = 0.0005
"""How long a transaction waits for as many events as the last one had. Askers answered together ask again together:
without it they fall into two halves that take turns at the disk, and each waits for both syncs."""

_BUSY_S = 5.0
_SHORT = 40  # bytes of encoded instructions: answers without fields
_ROWS = 512  # of one INSERT

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, event BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (seq INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS shapes (seq INTEGER PRIMARY KEY, fields BLOB NOT NULL);
"""

_encode = msgspec.msgpack.Encoder().encode
_shapes_decoder = msgspec.msgpack.Decoder(dict[str, tuple[str, ...]])


SQL_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises. UnicodeDecodeError: of a damaged file, whose bytes are in the text of its error."""


def digest_of(instructions: Sequence[InstructionType]) -> bytes:
    """Return eight bytes that stand for these instructions."""
    data = _encode(instructions)
    return _digest_of_short(data) if len(data) <= _SHORT else hashlib.blake2b(data, digest_size=8).digest()


@functools.lru_cache(maxsize=64)
def _digest_of_short(data: bytes) -> bytes:
    """Return the digest of few bytes: an answer without fields, which half of all events have, is hashed once."""
    return hashlib.blake2b(data, digest_size=8).digest()


def agrees(instructions: Sequence[InstructionType], digest: bytes, shapes: Shapes) -> bool:
    """Return whether the digest of the journal stands for these instructions. ``shapes``: by which it was written."""
    return digest_of(instructions) == digest or any(
        digest_of(in_shape(instructions, shapes, words)) == digest for words in (False, True)
    )


def shapes_of(path: Path) -> Callable[[int], Shapes]:
    """Return by which shapes an entry of the journal was written, by its number. Raises PlatformError."""
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)
        try:
            kept = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'shapes'").fetchone()
            rows = db.execute("SELECT seq, fields FROM shapes ORDER BY seq DESC").fetchall() if kept else []
        finally:
            db.close()
        known = [(seq, _shapes_decoder.decode(raw)) for seq, raw in rows]
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise PlatformError(f"cannot read {path}: {error}") from error
    return lambda seq: next((shapes for begin, shapes in known if begin <= seq), SHAPES_2)


def vouch(seq: int, data: bytes) -> bytes:
    """Return eight bytes that stand for a row."""
    return hashlib.blake2b(seq.to_bytes(8, "little") + data, digest_size=8).digest()


def sound_row(path: Path, after: int, seq: int, raw: bytes, digest: bytes) -> bytes:
    """Return the instructions' digest of a row that follows row ``after``. PlatformError: the row was changed, or a row
    before it is gone."""
    if seq != after + 1:
        raise PlatformError(f"{path} is damaged: event {after + 1} is missing")
    sound = isinstance(raw, bytes) and isinstance(digest, bytes) and len(digest) == 16
    if not sound or digest[8:] != vouch(seq, raw + digest[:8]):
        raise PlatformError(f"{path} is damaged: event {seq} was changed, its checksum is wrong")
    return digest[:8]


class JournalEntry(NamedTuple):
    """Is one journaled event."""

    seq: int
    event: Event
    digest: bytes


class Restored(NamedTuple):
    """Is the brain as of event ``seq`` (0: an empty journal), after ``replayed`` events on top of a snapshot.

    ``at``: time of the last event, 0.0 if there is none."""

    brain: Brain
    seq: int
    replayed: int
    at: float


class Journal:
    """Opens ``path`` for writing and takes it over from whoever wrote it before.

    ``incarnation``: of the master that opens it; None: one more than the last. ``on_durable(seq)`` and
    ``on_error(error)`` are called on the writer thread: everything up to ``seq`` is durable; nothing more will be.
    Raises PlatformError (cannot be opened or written), ConfigError (of another version), FencedError (``incarnation``
    is not newer than the file's).
    """

    def __init__(
        self,
        path: Path,
        incarnation: Incarnation | None = None,
        *,
        on_durable: Callable[[int], None] | None = None,
        on_error: Callable[[EverstepError], None] | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        self.path = path
        self.snapshot_every = snapshot_every
        self._on_durable, self._on_error = on_durable, on_error
        lived = path.exists() and path.stat().st_size > 0  # (a new job's full disk is told at once)
        full: Callable[[BaseException], bool] = _is_full if lived else lambda error: False
        self._db = with_space(lambda: _open(path), full)
        try:
            self.incarnation = with_space(lambda: self._take_over(incarnation), full)
            row = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()
            snap = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM snapshots").fetchone()
        except SQL_ERRORS as error:
            self._db.close()
            raise _failure(path, error) from error
        except EverstepError:
            self._db.close()
            raise
        self._seq: int = row[0]
        self._snapshot_seq: int = snap[0]
        self._mutex = threading.RLock()  # (its own ``with`` costs a fraction of the condition's)
        self._lock = threading.Condition(self._mutex)
        self._pending: list[tuple[int, bytes, bytes]] = []
        self._snapshots: list[tuple[int, bytes]] = []
        self._durable: int = self._seq
        self._group = 1  # events of the last transaction
        self._error: EverstepError | None = None
        self._closing = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<journal {self.path.name} #{self.incarnation} seq={self._seq} durable={self._durable}>"

    def _take_over(self, incarnation: Incarnation | None) -> Incarnation:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        meta: dict[str, int] = dict(db.execute("SELECT key, value FROM meta").fetchall())
        if meta.get("version", VERSION) not in READS:
            db.execute("ROLLBACK")
            raise _other_version(self.path, meta["version"])
        last = meta.get("incarnation", 0)
        if meta and meta.get("check") != _meta_check(last):
            db.execute("ROLLBACK")
            raise PlatformError(f"{self.path} is damaged: the number of its master was changed")
        mine = Incarnation(last + 1) if incarnation is None else incarnation
        if mine <= last:
            db.execute("ROLLBACK")
            raise FencedError(f"{self.path} belongs to master #{last}, this is only #{mine}")
        values = (VERSION, mine, _meta_check(mine))
        db.execute("INSERT OR REPLACE INTO meta VALUES ('version', ?), ('incarnation', ?), ('check', ?)", values)
        first = db.execute("SELECT COALESCE(MAX(seq), 0) + 1 FROM events").fetchone()[0]
        db.execute("INSERT OR REPLACE INTO shapes VALUES (?, ?)", (first, _encode(shapes_now())))
        db.execute("COMMIT")
        return mine

    # ------------------------------------------------------------ reading, before the first append

    def restore(
        self, check: bool = True, note: Callable[[int, Event, Sequence[InstructionType]], None] | None = None
    ) -> Restored:
        """Return the brain that the journal's events make: newest readable snapshot plus the events behind it. Of a
        journal that is being written: call ``flush`` before. ``check``: have SQLite look at all of its pages. ``note``:
        called with each event that is replayed, its number and instructions."""
        try:
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0] if check else "ok"
            if found != "ok":
                raise PlatformError(f"{self.path} is damaged: {' '.join(str(found).split())}")
            brain, seq = Brain(), 0
            for snap_seq, state in self._db.execute("SELECT seq, state FROM snapshots ORDER BY seq DESC").fetchall():
                if not isinstance(state, bytes) or state[-8:] != vouch(snap_seq, state[:-8]):
                    continue  # damaged: the events are all there
                try:
                    brain, seq = Brain.restore(state[:-8]), snap_seq
                    break
                except msgspec.MsgspecError:
                    continue  # of an older release
            replayed, at = 0, 0.0
            rows = self._db.execute("SELECT seq, event, digest FROM events WHERE seq > ? ORDER BY seq", (seq,))
            for row_seq, raw, digest in rows:
                sound_row(self.path, seq, row_seq, raw, digest)
                event = decode_event(raw)
                instructions = brain.handle(event)
                if note is not None:
                    note(row_seq, event, instructions)
                seq, at = row_seq, event.at
                replayed += 1
            if not replayed and seq:
                row = self._db.execute("SELECT event FROM events WHERE seq = ?", (seq,)).fetchone()
                at = decode_event(row[0]).at if row else 0.0
            return Restored(brain, seq, replayed, at)
        except SQL_ERRORS as error:
            raise _failure(self.path, error) from error
        except msgspec.MsgspecError as error:
            raise PlatformError(f"{self.path} is damaged: {error}") from error

    # ------------------------------------------------------------ writing, one caller at a time

    def append(self, event: Event, instructions: Sequence[InstructionType] = ()) -> int:
        """Queue an event with the instructions it gave; returns its number at once. Not durable yet: wait with
        ``durable`` or ``flush``, or for ``on_durable``. Raises the error that ended the journal, if one did."""
        data, short = _encode(event), digest_of(instructions)
        with self._mutex:
            if self._error is not None:
                raise self._error
            if self._closing:
                raise PlatformError(f"{self.path} is closed")
            self._seq += 1
            self._pending.append((self._seq, data, short + vouch(self._seq, data + short)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_loop, name="everstep-journal", daemon=True)
                self._thread.start()
            elif len(self._pending) == 1 or len(self._pending) == self._group:
                self._lock.notify_all()
            return self._seq

    def maybe_snapshot(self, brain: Brain) -> bool:
        """Store a snapshot if the last one is ``snapshot_every`` events old. Call right after ``append``."""
        if self._seq - self._snapshot_seq < self.snapshot_every:
            return False
        with self._lock:
            self._snapshot_seq = self._seq
            state = brain.snapshot()
            self._snapshots.append((self._seq, state + vouch(self._seq, state)))
        return True

    @property
    def seq(self) -> int:
        """Return number of the last event appended."""
        return self._seq

    @property
    def durable_seq(self) -> int:
        return self._durable

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until everything appended so far is durable. Raises DeadlineError, or the journal's error."""
        with self._lock:
            seq = self._seq
            done = self._lock.wait_for(lambda: self._durable >= seq or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            if not done:
                raise DeadlineError(f"{self.path} was not synced within {timeout_s:g} s")

    async def durable(self, seq: int) -> None:
        """Wait until event ``seq`` is durable. Raises the journal's error."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._durable >= seq:
                return
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((seq, future))
        await future

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and close. Quiet about an error that was told before."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return  # a disk that hangs: the daemon thread dies with the process
        self._db.close()

    # ------------------------------------------------------------ the writer thread

    def _waits_for(self, error: BaseException) -> bool:
        return not self._closing and _is_full(error)

    def _write_loop(self) -> None:
        while True:
            with self._lock:
                while not self._pending and not self._closing:
                    self._lock.wait()
                if len(self._pending) < self._group and not self._closing:
                    self._lock.wait_for(lambda: len(self._pending) >= self._group or self._closing, GATHER_S)
                events, self._pending = self._pending, []
                snapshots, self._snapshots = self._snapshots, []
                if not events and self._closing:
                    return
            error: EverstepError | None = None
            try:
                with_space(functools.partial(self._commit, events, snapshots), self._waits_for)
            except sqlite3.Error as failure:
                error = _failure(self.path, failure)
            except EverstepError as failure:
                error = failure
            with self._lock:
                if error is not None:
                    self._error = error
                else:
                    self._durable = events[-1][0]
                    self._group = len(events)
                ready = [f for seq, f in self._waiters if error is not None or seq <= self._durable]
                self._waiters = [w for w in self._waiters if error is None and w[0] > self._durable]
                self._lock.notify_all()
            for future in ready:
                _wake(future, error)
            if error is not None:
                if self._on_error is not None:
                    self._on_error(error)
                return
            if self._on_durable is not None:
                self._on_durable(self._durable)

    def _commit(self, events: list[tuple[int, bytes, bytes]], snapshots: list[tuple[int, bytes]]) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            row = db.execute("SELECT value FROM meta WHERE key = 'incarnation'").fetchone()
            if row is None or row[0] != self.incarnation:
                now = row[0] if row is not None else "nobody"
                raise FencedError(f"master #{self.incarnation} was replaced: {self.path} belongs to #{now}")
            # Many rows a statement: each statement that runs takes the interpreter's lock back from the loop's thread.
            for begin in range(0, len(events), _ROWS):
                part = events[begin : begin + _ROWS]
                rows = ",".join(("(?,?,?)",) * len(part))
                db.execute(f"INSERT INTO events VALUES {rows}", [value for event in part for value in event])
            if snapshots:
                db.executemany("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", snapshots)
                db.execute(
                    "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT 2)"
                )
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def check_version(db: sqlite3.Connection, path: Path) -> None:
    """Raises ConfigError if this everstep does not read a journal of its version."""
    for (version,) in db.execute("SELECT value FROM meta WHERE key = 'version'"):
        if version not in READS:
            raise _other_version(path, version)


def _other_version(path: Path, version: int) -> ConfigError:
    which = "a later everstep" if version > VERSION else "an earlier everstep"
    return ConfigError(
        f"{path} is of journal version {version}, this everstep reads {READS[0]} to {READS[-1]}: {which} reads it"
    )


def _meta_check(incarnation: int) -> int:
    return int.from_bytes(vouch(incarnation, b"meta")[:7], "little")


def _wake(future: asyncio.Future[None], error: EverstepError | None) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(None)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return


def _open(path: Path) -> sqlite3.Connection:
    wal = WalFile(path)
    try:
        with open(path, "ab", opener=private):  # (its log has the mode of the file)
            pass
    except OSError as error:
        if is_full(error):
            raise
        raise PlatformError(f"cannot open {path}: {error.strerror}") from None
    try:
        db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            wal.check(db)
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA wal_autocheckpoint = 4000")
            db.executescript(_SCHEMA)
        except BaseException:
            db.close()
            raise
        return db
    except SQL_ERRORS as error:
        raise _failure(path, error) from error


def _is_full(error: BaseException) -> bool:
    """Return whether a full disk is behind this error: a transaction that did not fit was rolled back as a whole."""
    code = getattr(error, "sqlite_errorcode", None)
    cause = error.__cause__
    return code == sqlite3.SQLITE_FULL or is_full(error) or (cause is not None and _is_full(cause))


def _failure(path: Path, error: Exception) -> PlatformError:
    return PlatformError(
        f"cannot write the journal {path}: {error}; see that the disk has space and the file is writable"
        if isinstance(error, sqlite3.OperationalError)
        or not isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError)
        else f"the journal {path} is damaged or no journal: {error}"
    )


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Yield every event in order, also while a master writes. Raises ConfigError (no such file), PlatformError."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: name the run directory that everstep run printed")
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)
        try:
            last = 0
            check_version(db, path)
            for seq, raw, digest in db.execute("SELECT seq, event, digest FROM events ORDER BY seq"):
                short = sound_row(path, last, seq, raw, digest)
                yield JournalEntry(seq, decode_event(raw), short)
                last = seq
        finally:
            db.close()
    except (*SQL_ERRORS, msgspec.MsgspecError) as error:
        raise PlatformError(f"cannot read {path}: {error}") from error
