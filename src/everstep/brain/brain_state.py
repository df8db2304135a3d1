"""All that the brain knows, in one struct: each part belongs to one concern."""

from __future__ import annotations

import msgspec

from everstep.bounds import MALFORMED
from everstep.brain.checkpoints import Checkpoints
from everstep.brain.duty import Duty
from everstep.brain.earlier import EARLIER
from everstep.brain.group import Groups
from everstep.brain.job import JobState
from everstep.brain.members import Members
from everstep.brain.policy_control import PolicyControl
from everstep.brain.protection import Protection
from everstep.brain.shards import Shards
from everstep.brain.supervision import Supervision
from everstep.model.placement import Placement
from everstep.model.spent import Spent
from everstep.model.spot_choice import SpotChoice

SNAPSHOT_VERSION = 8


class State(msgspec.Struct, kw_only=True):
    """Holds all that the brain knows; a snapshot is this, encoded."""

    version: int = SNAPSHOT_VERSION
    job: JobState = msgspec.field(default_factory=JobState)
    members: Members = msgspec.field(default_factory=Members)
    shards: Shards = msgspec.field(default_factory=Shards)
    checkpoints: Checkpoints = msgspec.field(default_factory=Checkpoints)
    protection: Protection = msgspec.field(default_factory=Protection)
    groups: Groups = msgspec.field(default_factory=Groups)
    control: PolicyControl = msgspec.field(default_factory=PolicyControl)
    duty: Duty = msgspec.field(default_factory=Duty)
    supervision: Supervision = msgspec.field(default_factory=Supervision)
    spent: Spent = Spent()
    spot: SpotChoice = SpotChoice()

    @property
    def placement(self) -> Placement | None:
        return self.protection.placement


class _Versioned(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(_Versioned)
_decoder = msgspec.msgpack.Decoder(State)


def encode_state(state: State) -> bytes:
    return _encoder.encode(state)


def decode_state(snapshot: bytes) -> State:
    """Read a snapshot, of this version or one in ``EARLIER``. Raises ``msgspec.ValidationError`` if it is none."""
    try:
        version = _version_decoder.decode(snapshot).version
        while version in EARLIER:
            snapshot, version = EARLIER[version](snapshot), version + 1
        if version != SNAPSHOT_VERSION:
            words = f"snapshot version {version}, this everstep reads {min(EARLIER)} to {SNAPSHOT_VERSION}"
            raise msgspec.ValidationError(words)
        return _decoder.decode(snapshot)
    except (*MALFORMED, AttributeError, KeyError, TypeError) as error:
        raise msgspec.ValidationError(f"no snapshot: {error}") from None
