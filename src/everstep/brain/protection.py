"""Records where partitions and mirrors are and shall be: the first map, losses of ps, moves, ps that come and leave.

Theory. The placement says what shall be; the ps do what is lacking and tell what they have (:class:`MirrorsReady`,
:class:`PartitionsReady`, their hello). From these facts and the set of living ps each next placement follows, whatever
happened in between (policies/recovery.py, policies/moves.py); no step of a recovery or move is remembered as such.

Which acknowledgements of a shard count: a worker tells which ps acknowledged, in which lives. They count if they are
those of one map since the last loss that cost anything. A loss costs nothing if every partition of the dead ps is
promoted or folded, and pushes were acknowledged only when their mirrors had them (``protect: acked``). Else the done
shards that may lack something are reopened: opening them shows the workers what each partition really has.
"""

from __future__ import annotations

import msgspec

from everstep.brain.placement import Acks
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.placement import Placement
from everstep.policies.domains import PsSite
from everstep.policies.placement_builder import Pending
from everstep.policies.stripes import StripeLayout

Inputs = dict[str, str | int | float | bool]


class Protection(msgspec.Struct, kw_only=True, rename={"inconsistent": "torn"}):
    """Holds what the brain knows of partitions and mirrors.

    ``layout``: what the placement shall become, over the ps ``over``, which stand at ``sites``. ``uneven``: a node came
    that offers places, and may get ps of others. ``awaited_until``: until then partitions stay where they are, since a
    ps is being started in the place of a lost one; 0.0: none is. ``mirrors``: the last mirror id used. ``ready``:
    mirrors that have everything. ``inconsistent``: mirrors that lack something for good, until the map names them no
    more. ``missing``: partitions whose owner does not hold them yet. ``leaving``: slots that give everything away and
    are not filled again, but for ``refill``: where another ps is started then. ``wave``: slots of ps that were started
    together: they get something when all of them have joined, by one plan. ``maps``: acknowledgements that count,
    newest last, none by a map from before ``counts_from``. ``gone``: partitions of which nothing is left, and which
    begin empty again once the workers ``ending`` have ended: they have the tables' first rows no more, and must not see
    these partitions without them.
    """

    placement: Placement | None = None
    layout: StripeLayout | None = None
    over: tuple[Slot, ...] = ()
    mirrors: int = 0
    ready: list[int] = []
    missing: dict[PartitionId, Pending] = {}
    leaving: list[Slot] = []
    maps: list[Acks] = []
    counts_from: int = 0
    refill: list[Slot] = []
    wave: list[Slot] = []
    gone: list[PartitionId] = []
    ending: list[tuple[Slot, Incarnation]] = []
    inconsistent: list[int] = []
    lost: list[PartitionId] = []
    stuck: list[PartitionId] = []
    went_back: bool = False
    sites: tuple[PsSite, ...] = ()
    uneven: bool = False
    awaited_until: float = 0.0

    def forget(self) -> None:
        """There is no map any more: nothing was trained that it would be for."""
        fresh = Protection()
        for field in self.__struct_fields__:
            setattr(self, field, getattr(fresh, field))

    def __repr__(self) -> str:
        version = self.placement.version if self.placement is not None else 0
        return f"<protection v{version} {len(self.missing)} partitions missing, {len(self.ready)} mirrors ready>"
