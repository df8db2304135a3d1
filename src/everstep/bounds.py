"""Bounds the ranges of numbers, and the forms of names, that come from outside: over the wire, or out of a file. The
decoder refuses what lies beyond.

A number without a range is one with which a stranger, or a mistake, makes a process count to it. ``tests/net/
test_bounds.py`` walks all messages and files and asks for the range of each number.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, MsgspecError

MALFORMED = (MsgspecError, ValueError, RecursionError)
"""What a decoder of msgspec raises on bytes that anybody may have written. ValueError: text that is no UTF-8;
RecursionError: nested deeper than Python goes. Neither is a ``MsgspecError``."""
MEMBERS_MAX = 10_000
"""Slots of a role: more than this release has been tried with."""
PLACES_MAX = 1024
"""Processes of one role on one node."""
INT63 = (1 << 63) - 1
SNAPSHOT_PATH = r"\Aimages/[0-9]{6,18}/(?:bucket|replica)-[A-Za-z0-9._-]{1,200}\Z"

Whole = Annotated[int, Meta(ge=0, le=1 << 56)]
"""A count, a size, a position: sums of many fit into 64 bits."""
WholeOrNone = Annotated[int, Meta(ge=-1, le=1 << 56)]
"""The same, with -1 for none."""
Whole63 = Annotated[int, Meta(ge=0, le=INT63)]
Places = Annotated[int, Meta(ge=0, le=PLACES_MAX)]
"""Of one node."""
Threads = Annotated[int, Meta(ge=0, le=1024)]
"""Of one process."""
Members = Annotated[int, Meta(ge=0, le=MEMBERS_MAX)]
Bits64 = Annotated[int, Meta(ge=0, extra={"bits": 64})]
"""A hash. The decoder of the wire has no larger numbers than 64 bits."""
ExitStatus = Annotated[int, Meta(ge=-(1 << 16), le=1 << 32)]
"""An exit code, or minus a signal's number."""
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Neither NaN nor infinite."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e10)]
Measured = Annotated[float, Meta(extra={"any": "shown, or judged where it is used"})]
"""What a script or a process measured of itself: a loss may be NaN."""

NameOfNode = Annotated[str, Meta(pattern=r"\A(?!\.\.?\Z)[^\x00-\x1f\x7f-\x9f/\\]{0,255}\Z")]
"""Bare: no separator, not ``.`` or ``..``, no control characters."""
PLACE_NAME = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,255}\Z"
PlaceName = Annotated[str, Meta(pattern=PLACE_NAME)]
"""Of a zone, or a class of machines; shown, and compared with those of prices."""
PriceUsd = Annotated[float, Meta(ge=0.0, le=1e6)]
"""Of one machine, for an hour."""
SocketPath = Annotated[str, Meta(pattern=r"\A(?!/)(?!.*\.\.)[^\x00-\x1f\x7f-\x9f\\]{0,255}\Z")]
"""Below the run directory."""
HostName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:%\[\]-]{0,255}\Z")]
SnapshotPath = Annotated[str, Meta(pattern=SNAPSHOT_PATH)]
"""Of a file of a checkpoint, in its place; nothing else of a place is read or deleted by name."""
Checksum = Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,128}\Z")]
