"""The frames that only ps send to each other, as their headers: a APPEND, and the codes that answer it. The twin of
native/wire.h, which writes them; here they are read where a message is for the machine.
"""

from __future__ import annotations

import struct

from everstep.errors import WireError
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.net.messages import Append, StreamEntry

_APPEND = struct.Struct("<qqqqqII")
_ENTRY = struct.Struct("<IIqQqq")
_CONFIRMED = struct.Struct("<qq")


def decode_append(header: bytes) -> Append:
    """Decode a message's header; WireError: malformed."""
    try:
        version, slot, incarnation, stream, first, n, n_confirmed = _APPEND.unpack_from(header)
        at = _APPEND.size
        if len(header) != at + n * _ENTRY.size + n_confirmed * _CONFIRMED.size or min(first, stream) < 0:
            raise WireError(f"malformed append: {n} entries in a header of {len(header)} bytes, from number {first} on")
        found = list(_ENTRY.iter_unpack(header[at : at + n * _ENTRY.size]))
        confirmed = _CONFIRMED.iter_unpack(header[at + n * _ENTRY.size :])
        return Append(
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
        raise WireError(f"malformed append: {error}") from None


def encode_append(message: Append) -> bytes:
    """Return the header of ``message``, which names no tables."""
    head = (message.version, message.sender, message.incarnation, message.stream, message.first)
    out = [_APPEND.pack(*head, len(message.entries), len(message.confirmed))]
    for e, mirror in zip(message.entries, message.mirrors, strict=True):
        out.append(_ENTRY.pack(e.partition, e.kind, e.seq, e.size_bytes, mirror, e.sync))
    out += [_CONFIRMED.pack(partition, seq) for partition, seq in message.confirmed]
    return b"".join(out)
