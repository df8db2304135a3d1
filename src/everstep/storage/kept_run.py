"""Keeps the run directory of a job at a place that outlives it: settings, summary, journal, audit logs, logs.

In ``run/`` of the place: ``index.json`` says what there is; the files are in a folder of their own for each time that
the run is kept. The index is written last: a writer that is killed leaves what was kept before. Secrets, checkpoints
and the model are not among the files.

What is read from a place is a stranger's: names are of a known kind, sizes and digests are checked.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from everstep.errors import ConfigError
from everstep.storage.kept_files import JOURNAL, KeptFile, fetch_file, put_file, read_index
from everstep.storage.places import StoragePlace, open_place

FOLDER: Final = "run"
INDEX: Final = f"{FOLDER}/index.json"
VERSION: Final = 1
JOB_FILE: Final = "elasticjob.json"
"""The object of the job in its cluster, with its last status."""
FILES: Final = (
    "job.json",
    "summary.json",
    JOURNAL,
    "resume.json",
    "events.jsonl",
    "members.jsonl",
    "metrics.jsonl",
    JOB_FILE,
)
_FOLDERS: Final = ("audit", "logs", "nodes")
_NAME = re.compile(r"(audit|logs|nodes)(/[A-Za-z0-9_][A-Za-z0-9._-]{0,250}){1,3}")
_INDEX_MAX_BYTES: Final = 64 << 20


class KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    """Is the index. ``owner``: what tells this job from others of its name. ``number``: how often it was kept."""

    version: int = VERSION
    job: str
    owner: str
    number: int
    at: float
    files: tuple[KeptFile, ...] = ()


_decoder = msgspec.json.Decoder(KeptRun)


def keep_run(place: StoragePlace, run_dir: Path, job: str, owner: str) -> KeptRun:
    """Copy what a run directory has to a place; return the index. Nobody may write the run directory meanwhile.

    Raises ConfigError: the place has the run of another job; StorageError, PlatformError."""
    before = read_kept(place)
    refuse_others(place, before, job, owner)
    number = before.number + 1 if before is not None else 1
    for folder in (FOLDER, f"{FOLDER}/{number}"):
        place.make_private(folder)
    files = tuple(put_file(place, run_dir, name, f"{FOLDER}/{number}/{name}") for name in names_in(run_dir))
    index = KeptRun(job=job, owner=owner, number=number, at=time.time(), files=files)
    place.put(INDEX, msgspec.json.encode(index))
    for path in place.sizes():
        if path.startswith(f"{FOLDER}/") and path != INDEX and not path.startswith(f"{FOLDER}/{number}/"):
            place.delete(path)
    return index


def refuse_others(place: StoragePlace, kept: KeptRun | None, job: str, owner: str) -> None:
    """Raise ConfigError if another job's run is kept at a place."""
    if kept is not None and (kept.job, kept.owner) != (job, owner):
        raise ConfigError(
            f"out = {place.url!r}: has what job {kept.job} left on "
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(kept.at))}; name another place"
        )


def names_in(run_dir: Path) -> list[str]:
    """Return the files of a run directory that are kept."""
    names = [name for name in FILES if (run_dir / name).is_file()]
    for folder in _FOLDERS:
        found = sorted((run_dir / folder).rglob("*"))
        names += [str(p.relative_to(run_dir)) for p in found if p.is_file() and not p.is_symlink()]
    return [name for name in names if _is_known(name)]


def _is_known(name: str) -> bool:
    return name in FILES or _NAME.fullmatch(name) is not None


def read_kept(place: StoragePlace) -> KeptRun | None:
    """Return the index of a place; None: no run is kept there. Raises ConfigError: it is damaged, or another version's;
    StorageError."""
    return read_index(place, INDEX, _decoder, VERSION, _INDEX_MAX_BYTES, _is_known)


def is_kept_run(where: str) -> bool:
    """Return whether a RUN_DIR is a place at which a run is kept, and not a run directory."""
    return "://" in where or (not (Path(where) / "job.json").exists() and (Path(where) / INDEX).exists())


@contextlib.contextmanager
def fetched_run(where: str) -> Iterator[Path]:
    """Give a copy of the run that is kept at a place; it is gone afterwards. Raises ConfigError: none is kept there, or
    it is damaged; StorageError, PlatformError."""
    place = open_place(where)
    index = read_kept(place)
    if index is None:
        raise ConfigError(f"{where}: no run is kept there")
    with tempfile.TemporaryDirectory(prefix="everstep-kept-") as folder:
        for file in index.files:
            fetch_file(place, f"{FOLDER}/{index.number}/{file.path}", file, Path(folder) / file.path)
        yield Path(folder)
