"""Keeps ``RUN_DIR/unsuspend.json``: the word of ``everstep unsuspend`` for the next master of a suspended job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.bounds import MALFORMED
from everstep.storage.atomic import write_atomic

UNSUSPEND_FILE = "unsuspend.json"


class Unsuspension(msgspec.Struct, frozen=True, kw_only=True):
    """Says that a suspended job goes on. ``number``: of the suspension that ends: a later one is not meant. ``reason``:
    for people."""

    number: int
    reason: str


_decoder = msgspec.json.Decoder(Unsuspension)


def write_unsuspension(run_dir: Path, word: Unsuspension) -> None:
    """Write it, durable on return. Raises PlatformError."""
    write_atomic(run_dir / UNSUSPEND_FILE, msgspec.json.encode(word))


def read_unsuspension(run_dir: Path) -> Unsuspension | None:
    """Return it; None: it is not there, or damaged: then the job stays suspended."""
    try:
        return _decoder.decode((run_dir / UNSUSPEND_FILE).read_bytes())
    except (OSError, *MALFORMED):
        return None
