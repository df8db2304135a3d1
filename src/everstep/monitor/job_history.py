"""Keeps a record of each job in one SQLite file of the user: EVERSTEP_HISTORY names it, "off" keeps none.

Many commands write at once: SQLite's write-ahead log, short transactions, and a wait of at most ``BUSY_S`` for another
writer. A file that cannot be used is one line to the user, and never ends a job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import ConfigError, PlatformError
from everstep.sizing.past_jobs import KeptJob, PastJob

VARIABLE: Final = "EVERSTEP_HISTORY"
VERSION: Final = 1
BUSY_S: Final = 3.0
RECORD_MAX_BYTES: Final = 1 << 20
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, script_id TEXT NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_script ON jobs (script_id, at);
"""
_decoder = msgspec.json.Decoder(PastJob)


def history_path(environment: Mapping[str, str]) -> Path | None:
    """Return where the history is; None: none is kept."""
    setting = environment.get(VARIABLE, "")
    if setting == "off":
        return None
    if setting:
        return Path(setting).expanduser()
    state = environment.get("XDG_STATE_HOME", "")
    home = Path(state) if state.startswith("/") else Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    return home / "everstep" / "history.sqlite"


def script_digest(script: Path) -> str:
    """Return a digest of a script's text; "": it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.blake2b(script.read_bytes(), digest_size=8).hexdigest()
    return ""


def args_digest(args: Sequence[str]) -> str:
    """Return a digest of a script's arguments."""
    return hashlib.blake2b("\0".join(args).encode(errors="surrogateescape"), digest_size=8).hexdigest()


class JobHistory:
    """Is the file at ``path``. Every call opens it, so that nothing is held between them. All raise PlatformError with
    one line: it is damaged, locked, cannot be written; ConfigError: it is of another version."""

    def __init__(self, path: Path, busy_s: float = BUSY_S) -> None:
        self.path, self._busy_s = path, busy_s

    def __repr__(self) -> str:
        return f"<JobHistory {self.path}>"

    def add(self, job: PastJob) -> int:
        """Add a record; durable on return. Return its number."""
        with self._open(write=True) as db:
            row = (job.at, job.script_id, msgspec.json.encode(job))
            done = db.execute("INSERT INTO jobs (at, script_id, record) VALUES (?, ?, ?)", row)
            assert done.lastrowid is not None
            return done.lastrowid

    def jobs(self, script_id: str = "") -> list[KeptJob]:
        """Return all records, or those of a script, the oldest first. [] where there is no file."""
        if not self.path.exists():
            return []
        where, values = (" WHERE script_id = ?", (script_id,)) if script_id else ("", ())
        with self._open(write=False) as db:
            rows = db.execute(f"SELECT number, record FROM jobs{where} ORDER BY number", values).fetchall()
        try:
            return [KeptJob(number, _decoder.decode(record)) for number, record in rows]
        except MALFORMED:
            raise self._unusable("a record in it is damaged") from None

    def forget(self, numbers: Sequence[int] | None) -> int:
        """Remove these records, None: all. Return how many there were."""
        if not self.path.exists():
            return 0
        with self._open(write=True) as db:
            if numbers is None:
                return db.execute("DELETE FROM jobs").rowcount
            return sum(db.execute("DELETE FROM jobs WHERE number = ?", (n,)).rowcount for n in numbers)

    @contextlib.contextmanager
    def _open(self, write: bool) -> Iterator[sqlite3.Connection]:
        """Open the file, make it where it is new, and commit at the end."""
        db: sqlite3.Connection | None = None
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                db = sqlite3.connect(self.path, timeout=self._busy_s)
            else:
                db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", timeout=self._busy_s, uri=True)
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise ConfigError(
                    f"history {self.path}: is of version {version}, this everstep reads {VERSION}; name another file "
                    f"in {VARIABLE}"
                )
            if write:
                if not version:
                    with contextlib.suppress(sqlite3.OperationalError):  # (a file system without shared memory)
                        db.execute("PRAGMA journal_mode=WAL")
                    db.executescript(_SCHEMA + f"PRAGMA user_version={VERSION};")
                    self.path.chmod(0o600)
                db.execute("BEGIN IMMEDIATE")
            elif not version:
                raise self._unusable("it is no history of everstep")
            with db:
                yield db
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None
        finally:
            if db is not None:
                db.close()

    def _unusable(self, why: str) -> PlatformError:
        return PlatformError(
            f"history {self.path}: cannot be used: {' '.join(why.split())}; move it away, or name another file in "
            f"{VARIABLE} (off: none)"
        )


def user_history(environment: Mapping[str, str] = os.environ) -> JobHistory | None:
    """Return the history of this user; None: none is kept."""
    path = history_path(environment)
    return JobHistory(path) if path is not None else None
