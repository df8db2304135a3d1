"""Has where copies of a pipeline's stages are kept: at agents of other nodes."""

from __future__ import annotations

import msgspec

from everstep.bounds import PlaceName
from everstep.ids import NodeId
from everstep.model.member import Address


class CopyPlace(msgspec.Struct, frozen=True):
    """Is an agent that keeps copies for workers of other nodes. ``machine``: nodes of one machine are lost together;
    "": it is the only one of its machine."""

    node: NodeId
    machine: PlaceName
    address: Address
