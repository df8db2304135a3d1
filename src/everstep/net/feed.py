"""The frames that only ps send to each other, as their headers: a FEED, and the codes that answer it. The twin of
native/wire.h, which writes them; here they are read where a feed is for the machine.
"""

from __future__ import annotations

import struct

from everstep.errors import WireError
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.net.messages import Feed, StreamEntry

_FEED = struct.Struct("<qqqqqII")
_ENTRY = struct.Struct("<IIqQqq")
_CONFIRMED = struct.Struct("<qq")


def decode_feed(header: bytes) -> Feed:
    """Decode a feed's header; WireError: malformed."""
    try:
        version, slot, incarnation, stream, first, n, n_confirmed = _FEED.unpack_from(header)
        at = _FEED.size
        if len(header) != at + n * _ENTRY.size + n_confirmed * _CONFIRMED.size or min(first, stream) < 0:
            raise WireError(f"malformed feed: {n} entries in a header of {len(header)} bytes, from number {first} on")
        found = list(_ENTRY.iter_unpack(header[at : at + n * _ENTRY.size]))
        confirmed = _CONFIRMED.iter_unpack(header[at + n * _ENTRY.size :])
        return Feed(
            version,
            Slot(slot),
            Incarnation(incarnation),
            (),
            tuple(
                StreamEntry(PartitionId(partition), seq, kind, size, sync)
                for partition, kind, seq, size, _, sync in found
            ),
            tuple(mirror for _, _, _, _, mirror, _ in found),
            tuple((PartitionId(partition), seq) for partition, seq in confirmed),
            first,
            stream,
        )
    except struct.error as error:
        raise WireError(f"malformed feed: {error}") from None


def encode_feed(feed: Feed) -> bytes:
    """Return the header of ``feed``, which names no tables."""
    head = (feed.version, feed.sender, feed.incarnation, feed.stream, feed.first)
    out = [_FEED.pack(*head, len(feed.entries), len(feed.confirmed))]
    for e, mirror in zip(feed.entries, feed.mirrors, strict=True):
        out.append(_ENTRY.pack(e.partition, e.kind, e.seq, e.size_bytes, mirror, e.sync))
    out += [_CONFIRMED.pack(partition, seq) for partition, seq in feed.confirmed]
    return b"".join(out)
