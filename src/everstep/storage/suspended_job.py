"""Keeps what a suspended job needs beside its checkpoints, so that it goes on on another machine.

In ``suspended/`` of the place: ``index.json`` says what there is; the files are in a folder of the suspension's number.
They go there in the order of their worth: first those without which the job cannot go on (secret, settings, journal),
then those that prove what was trained (audit logs), then those for people. The index is written behind the first ones,
and again behind the last ones: a machine that goes meanwhile leaves a job that goes on.

What is read from a place is a stranger's: names are of a known kind, sizes and digests are checked. The place has the
job's secret: who may read it may join the job.
"""

from __future__ import annotations

import random
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Final

import msgspec

from everstep.errors import ConfigError
from everstep.storage.kept_files import JOURNAL, KeptFile, fetch_file, put_file, read_index
from everstep.storage.places import StoragePlace

FOLDER: Final = "suspended"
INDEX: Final = f"{FOLDER}/index.json"
VERSION: Final = 1
NEEDED: Final = ("secret", "job.json", "summary.json", JOURNAL)
"""Without these a job cannot go on."""
_ALSO_NEEDED = ("resume.json",)  # of a job that began from a checkpoint
_SHOWN = ("events.jsonl", "members.jsonl", "metrics.jsonl")  # for people; a job goes on without
_LOG = re.compile(r"audit/[a-z]{1,16}-\d{1,9}\.\d{1,9}\.log")
_INDEX_MAX_BYTES = 16 << 20
_CLAIM = "claim-"
CLAIM_S: Final = 10.0
"""So long another taker's claim is waited for."""


class Taken(msgspec.Struct, frozen=True):
    """Says where the job went on: on which host, in which run directory, and when."""

    host: str
    run_dir: str
    at: float


class SuspendedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Is the index. ``number``: of the suspension. ``host``, ``run_dir``: where the job was. ``complete``: all files
    are there, not only the needed ones. ``taken``: the job has gone on; None: it has not."""

    version: int = VERSION
    job: str
    number: int
    at: float
    host: str
    run_dir: str
    files: tuple[KeptFile, ...] = ()
    complete: bool = False
    taken: Taken | None = None


_decoder = msgspec.json.Decoder(SuspendedJob)


def keep_suspended(place: StoragePlace, run_dir: Path, job: str, number: int) -> SuspendedJob:
    """Put the files of a suspended job beside its checkpoints; return the index. Raises StorageError, PlatformError."""
    place.make_private(FOLDER)
    place.make_private(f"{FOLDER}/{number}")
    index = SuspendedJob(job=job, number=number, at=time.time(), host=socket.gethostname(), run_dir=str(run_dir))
    needed = [*NEEDED, *(name for name in _ALSO_NEEDED if (run_dir / name).exists())]
    index = _put_files(place, run_dir, index, needed)
    _put_index(place, index)
    logs = sorted(f"audit/{path.name}" for path in (run_dir / "audit").glob("*.log"))
    shown = [name for name in _SHOWN if (run_dir / name).exists()]
    index = _put_files(place, run_dir, index, [name for name in logs if _LOG.fullmatch(name)] + shown)
    now = read_suspended(place)  # (it may have been taken meanwhile)
    taken = now.taken if now is not None and now.number == number else None
    index = msgspec.structs.replace(index, complete=True, taken=taken)
    _put_index(place, index)
    for path in place.sizes():
        folder = path.split("/")[1] if path.startswith(f"{FOLDER}/") and path.count("/") > 1 else str(number)
        if folder != str(number):
            place.delete(path)  # of an earlier suspension
    return index


def read_suspended(place: StoragePlace) -> SuspendedJob | None:
    """Return the index of a place; None: no suspended job is kept there. Raises ConfigError: it is damaged, or another
    version's; StorageError."""
    index = read_index(place, INDEX, _decoder, VERSION, _INDEX_MAX_BYTES, _is_known)
    if index is None:
        return None
    names = [file.path for file in index.files]
    if lacking := [name for name in NEEDED if name not in names]:
        raise ConfigError(f"{place.url}/{INDEX} is damaged: it has no {lacking[0]}")
    return index


def fetch_suspended(place: StoragePlace, index: SuspendedJob, run_dir: Path) -> None:
    """Copy the files of a suspended job into a new run directory. Raises PlatformError: one is damaged, or the disk
    refuses; StorageError."""
    for file in index.files:
        fetch_file(place, f"{FOLDER}/{index.number}/{file.path}", file, run_dir / file.path)


def mark_taken(place: StoragePlace, number: int, run_dir: Path, wait_s: float = CLAIM_S) -> None:
    """Say that the job has gone on here: nobody else is to go on with it. Nothing is said where another suspension, or
    none, is kept. Raises ConfigError: somebody else has taken it, or has been taking it for ``wait_s``; StorageError.

    Places have no lock that all of them share. Each taker puts a claim there, and then looks: a taker that sees no
    claim but its own has the job; any other one takes its claim back, and tries again after a random time. Of two
    takers, the one that puts its claim later sees the other's, so at most one sees itself alone.
    """
    us = Taken(socket.gethostname(), str(run_dir), time.time())
    claim = f"{FOLDER}/{number}/{_CLAIM}{secrets.token_hex(8)}"
    end = time.monotonic() + wait_s
    while True:
        index = read_suspended(place)
        if index is None or index.number != number:
            return
        if index.taken is not None:
            if (index.taken.host, index.taken.run_dir) == (us.host, us.run_dir):
                return
            raise ConfigError(f"{place.url}: this job is not suspended any more: {where_words(index)}")
        place.put(claim, us.host.encode())
        try:
            others = [p for p in place.sizes() if p.startswith(f"{FOLDER}/{number}/{_CLAIM}") and p != claim]
            if not others:
                index = read_suspended(place)
                if index is not None and index.number == number and index.taken is None:
                    _put_index(place, msgspec.structs.replace(index, taken=us))
                continue  # (the index says who has it)
        finally:
            place.delete(claim)
        if time.monotonic() > end:
            raise ConfigError(
                f"{place.url}: somebody else is taking this job, or died while taking it: if nobody does, delete "
                f"{others[0]} there"
            )
        time.sleep(random.uniform(0.02, 0.2))


def _is_known(name: str) -> bool:
    return name in (*NEEDED, *_ALSO_NEEDED, *_SHOWN) or _LOG.fullmatch(name) is not None


def _put_index(place: StoragePlace, index: SuspendedJob) -> None:
    place.put(INDEX, msgspec.json.encode(index))


def _put_files(place: StoragePlace, run_dir: Path, index: SuspendedJob, names: list[str]) -> SuspendedJob:
    """Copy files of the run directory to the place; return the index with them."""
    done = [put_file(place, run_dir, name, f"{FOLDER}/{index.number}/{name}") for name in names]
    return msgspec.structs.replace(index, files=(*index.files, *done))


def where_words(index: SuspendedJob) -> str:
    """Return where the job went on, for people."""
    taken = index.taken
    assert taken is not None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(taken.at))
    return f"it went on at {taken.host}, {taken.run_dir}, since {at}"
