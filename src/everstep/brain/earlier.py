"""Events as earlier releases journaled them, made into today's. (Values of enums: see ``model.reasons``.)"""

from __future__ import annotations

import msgspec

from everstep.brain.events import BrainEvent, ShardReturned

_LATE = "its step went on without it"


def as_now(event: BrainEvent) -> BrainEvent:
    """What an earlier release said in words is in typed fields now."""
    if type(event) is ShardReturned and event.reason == _LATE and not event.late:
        return msgspec.structs.replace(event, late=True)
    return event
