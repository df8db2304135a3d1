"""Journals and snapshots of earlier releases: made into today's. (Values of enums: see ``model.reasons``.)

Until version 2 an entry was one array: tag, time, who said it (in the facts of workers and ps), fields. Since version 3
it is an :class:`Event`: time, fact, sender, cause. An entry says by its shape of which kind it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from everstep.bounds import MALFORMED
from everstep.brain.events import RULES, Event, Sender
from everstep.ids import NodeId

_LATE = "its step went on without it"
_BY_WORKERS: Final = {
    "chief_asked",
    "group_asked",
    "group_left",
    "group_stalled",
    "group_synced",
    "once_asked",
    "plan_registered",
    "replica_written",
    "shard_asked",
    "shard_done",
    "shard_returned",
    "steps_committed",
}
_BY_PS: Final = {"buckets_ready", "images_written", "load_failed", "mirrors_ready"}
_BY_AGENTS: Final = {"node_joined", "process_exited"}
_BY_COMMANDS: Final = {"drain_asked", "scale_asked", "stop_asked"}

_encode = msgspec.msgpack.Encoder().encode
_plain = msgspec.msgpack.Decoder(list[Any]).decode
_decode = msgspec.msgpack.Decoder(Event).decode


def decode_event(raw: bytes) -> Event:
    """Return an entry of the journal, of this release or an earlier one. Raises ``msgspec.MsgspecError``."""
    try:
        if len(raw) > 1 and 0x90 <= raw[0] <= 0x9F and 0xA0 <= raw[1] <= 0xBF:  # an array that begins with a short text
            return _decode(_encode(_as_now(_plain(raw))))
        return _decode(raw)
    except (*MALFORMED, IndexError, TypeError) as error:
        raise msgspec.ValidationError(f"no event: {error}") from None


def _as_now(entry: list[Any]) -> list[Any]:
    tag, at, *fields = entry
    sender = Sender()
    if tag in _BY_WORKERS or tag in _BY_PS:
        slot, incarnation, *fields = fields
        sender = Sender("worker" if tag in _BY_WORKERS else "ps", slot, incarnation)
    elif tag == "member_joined":
        sender = Sender(*fields[:3])
    elif tag in _BY_AGENTS:
        sender = Sender("agent", node=NodeId(fields[0] if tag == "node_joined" else ""))
    elif tag in _BY_COMMANDS:
        sender = Sender("command")
    if tag == "shard_returned" and len(fields) == 3:
        fields = [*fields, fields[2] == _LATE]
    return [at, [tag, *fields], sender]


_GROUPS_OF_5: Final = {
    "history": ("stints", "boundaries", "skips", "voids"),
    "timing": ("due_at", "too_few", "quiet_until"),
    "streak": ("blamed", "blamed_at", "furthest"),
    "waits": ("stuck", "broken", "broken_step", "ended", "apart"),
}


def state_of_5(snapshot: bytes) -> bytes:
    """A snapshot of version 5, made into one of version 6: some of what is known of a group is in parts of it now.
    Raises what decoding raises."""
    state = msgspec.msgpack.decode(snapshot)
    groups = state["groups"]
    for part, fields in _GROUPS_OF_5.items():
        groups[part] = {field: groups.pop(field) for field in fields if field in groups}
    state["version"] = 6
    return _encode(state)


def state_of_6(snapshot: bytes) -> bytes:
    """A snapshot of version 6, made into one of version 7: what a job began with, and failed loads, are in parts.
    Raises what decoding raises."""
    state = msgspec.msgpack.decode(snapshot)
    checkpoints = state["checkpoints"]
    checkpoints["start"] = [checkpoints.pop("resumed", 0), checkpoints.pop("resumed_from", "")]
    checkpoints["failed_loads"] = [checkpoints.pop("refused", {}), checkpoints.pop("aside", 0)]
    state["version"] = 7
    return _encode(state)


def state_of_7(snapshot: bytes) -> bytes:
    """Make a snapshot of version 7 into one of version 8: counts of failures, and rules, are parts of the job.
    Raises what decoding raises."""
    state = msgspec.msgpack.decode(snapshot)
    job = state["job"]
    job["failures"] = {role: job.pop(f"{role}_failures", 0) for role in ("worker", "ps", "master", "node")}
    job["rules"] = {rule: job.pop(rule, False) for rule in RULES}
    state["version"] = 8
    return _encode(state)


EARLIER: Final[Mapping[int, Callable[[bytes], bytes]]] = {5: state_of_5, 6: state_of_6, 7: state_of_7}
"""By version of a snapshot: what makes it into one of the next version."""
