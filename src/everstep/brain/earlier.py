"""The journal of earlier releases: its entries, made into today's. (Values of enums: see ``model.reasons``.)

Until version 2 an entry was one array: tag, time, who said it (in the facts of workers and ps), fields. Since version 3
it is an :class:`Event`: time, fact, sender, cause. An entry says by its shape of which kind it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from everstep.bounds import MALFORMED
from everstep.brain.events import Event, Sender
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

_ADDED: Final[tuple[dict[str, frozenset[str]], ...]] = (
    {
        "OptimizerSpec": frozenset({"alpha", "lr_decay", "momentum_decay", "amsgrad", "centered", "decoupled"}),
        "Group": frozenset({"over"}),
    },
    {"ReplicaImage": frozenset({"waits_in", "waits_from"})},
)
"""Fields that structs within instructions got later, by struct: newest release first. A digest of before stands for
instructions without them."""

_encode = msgspec.msgpack.Encoder().encode
_plain = msgspec.msgpack.Decoder(list[Any]).decode
_decode = msgspec.msgpack.Decoder(Event).decode


def decode_event(raw: bytes) -> Event:
    """An entry of the journal, of this release or an earlier one. Raises ``msgspec.MsgspecError``."""
    try:
        if len(raw) > 1 and 0x90 <= raw[0] <= 0x9F and 0xA0 <= raw[1] <= 0xBF:  # an array that begins with a short text
            return _decode(_encode(_as_now(_plain(raw))))
        return _decode(raw)
    except (*MALFORMED, IndexError, TypeError) as error:
        raise msgspec.ValidationError(f"no event: {error}") from None


def as_then(instructions: object) -> Iterator[Any]:
    """Instructions as plain values, as they were before the newest fields came, before those came that are next, ..."""
    lacking: dict[str, frozenset[str]] = {}
    for added in _ADDED:
        lacking = {name: lacking.get(name, frozenset()) | added.get(name, frozenset()) for name in {*lacking, *added}}
        yield _plain_without(instructions, lacking)


def _plain_without(value: Any, lacking: dict[str, frozenset[str]]) -> Any:
    match value:
        case msgspec.Struct():
            config = value.__struct_config__
            gone = lacking.get(type(value).__name__, frozenset())
            found = {f: _plain_without(getattr(value, f), lacking) for f in value.__struct_fields__ if f not in gone}
            if config.array_like:
                return [*([] if config.tag is None else [config.tag]), *found.values()]
            return found if config.tag is None else {config.tag_field or "type": config.tag, **found}
        case tuple() | list():
            return [_plain_without(one, lacking) for one in value]
        case dict():
            return {key: _plain_without(one, lacking) for key, one in value.items()}
    return value


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
