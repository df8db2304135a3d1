"""The newest differences of buckets that have several mirrors, kept until all of these have them: with them one mirror
is brought to the point of another when the bucket gets a new owner.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from everstep.ids import BucketId
from everstep.protect.replication import Blob


class Tails(Protocol):
    """Is what the machine needs of ``KeptTails``, or of the inbox, which keeps those of the feeds that it takes
    itself."""

    def keep(self, bucket: BucketId, seq: int, blob: Blob) -> None:
        """A difference was applied; nothing if one as new is kept already. ``blob`` outlives its message."""

    def confirm(self, bucket: BucketId, seq: int) -> None:
        """All mirrors have the bucket's differences up to ``seq``."""

    def after(self, bucket: BucketId, seq: int) -> list[tuple[int, Blob]]:
        """Return (seq, difference) of those that are newer, oldest first."""

    def drop(self, bucket: BucketId) -> None:
        """Nothing is kept of it any more."""

    def clear(self) -> None:
        """Forget all differences of all partitions."""


class KeptTails:
    """Is ``Tails`` in Python: the oracle of those in native/inbox.cpp."""

    def __init__(self) -> None:
        self._tails: dict[BucketId, deque[tuple[int, Blob]]] = {}

    def __repr__(self) -> str:
        return f"<KeptTails { ({b: len(tail) for b, tail in self._tails.items()}) }>"

    def keep(self, bucket: BucketId, seq: int, blob: Blob) -> None:
        tail = self._tails.setdefault(bucket, deque())
        if not tail or tail[-1][0] < seq:
            tail.append((seq, blob))

    def confirm(self, bucket: BucketId, seq: int) -> None:
        tail = self._tails.get(bucket)
        while tail and tail[0][0] <= seq:
            tail.popleft()

    def after(self, bucket: BucketId, seq: int) -> list[tuple[int, Blob]]:
        return [(s, blob) for s, blob in self._tails.get(bucket, ()) if s > seq]

    def drop(self, bucket: BucketId) -> None:
        self._tails.pop(bucket, None)

    def clear(self) -> None:
        self._tails.clear()
