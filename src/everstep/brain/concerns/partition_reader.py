"""Says what follows from what is known of partitions and mirrors: which ps serve, what is missing, what is at rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from everstep.brain.brain_state import State
from everstep.brain.checkpoints import has_checkpoints
from everstep.config.parity import ParityCode, parse_code
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.member import Member, Role
from everstep.model.placement import MirrorKind, PsPlace
from everstep.policies.domains import Limit, PsSite, at_home, limits_of
from everstep.policies.moves import under_way
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.placement_builder import How, PlacementBuilder, at_risk, level_counts, lost_with
from everstep.policies.stripes import closed_slots, members_of


class PartitionReader:
    """Reads :class:`Protection`, for all that change it and for displays."""

    __slots__ = ("checkpoints", "job", "members", "protection", "shards")

    def __init__(self, state: State) -> None:
        self.job, self.members, self.shards = state.job, state.members, state.shards
        self.checkpoints, self.protection = state.checkpoints, state.protection

    @property
    def code(self) -> ParityCode:
        return parse_code(self.job.spec.parity)

    def servers(self) -> list[Member]:
        """The ps that live, have said where they listen, and are not on their way out."""
        records = self.members.servers.values()
        return [s.member for s in records if s.running and not s.stopping and s.member.address is not None]

    def sites(self, slots: Iterable[Slot]) -> tuple[PsSite, ...]:
        """Return where these ps stand."""
        members, home = self.members, self.members.machine_of(HOME_NODE)
        found = []
        for slot in sorted(slots):
            name = members.servers[slot].member.node
            node, machine = members.nodes.get(name), members.machine_of(name)
            found.append(PsSite(slot, machine, node.zone if node is not None else "", machine == home))
        return tuple(found)

    def limits(self) -> tuple[Limit, ...]:
        """Return what the wanted layout keeps apart."""
        return limits_of(self.code, self.protection.sites)

    def ps_at_home(self) -> int:
        """Return how many ps the master's machine gets before others get any."""
        nodes = self.members.nodes.values()
        offers = [n for n in nodes if n.takes(Role.PS) and n.alive and not n.draining]
        if self.ps_stay:
            offers = [n for n in offers if n.stays] or offers
        return at_home(self.code, len({self.members.machine_of(n.node) for n in offers}))

    @property
    def ps_stay(self) -> bool:
        """Return whether ps belong on machines that stay."""
        return "ps" in self.job.spec.reliable

    def lost_with_one_machine(self) -> tuple[str, int]:
        """Return, of all machines with ps but the master's, the one whose loss now would cost most partitions, and how
        many."""
        if self.protection.placement is None:
            return "", 0
        together: dict[str, set[Slot]] = {}
        for site in self.sites(m.slot for m in self.servers()):
            if not site.home:
                together.setdefault(site.machine, set()).add(site.slot)
        builder = self.builder() if together else None
        lost = {machine: at_risk(builder, slots) for machine, slots in together.items() if builder is not None}
        return max(lost.items(), key=lambda item: (item[1], item[0]), default=("", 0))

    def loading(self, slot: Slot, placement: int = 0) -> list[tuple[PartitionId, int]]:
        """Return partitions that this ps is to load, and their checkpoints; ``placement``: by that one or earlier (0:
        any)."""
        found = self.protection.placement
        if found is None:
            return []
        snapshots = dict(found.snapshots)
        return [
            (partition, snapshots[partition])
            for partition, pending in self.protection.missing.items()
            if pending.how is How.LOAD
            and found.owner[partition] == slot
            and snapshots.get(partition)
            and (not placement or pending.version <= placement)
        ]

    def builder(self) -> PlacementBuilder:
        """Return the present placement, to be changed."""
        placement, protection = self.protection.placement, self.protection
        assert placement is not None
        joined = {(m.slot, m.incarnation) for m in self.servers()}
        # A ps of the map in a later life is not the one that was meant.
        stale = {p.slot for p in placement.servers if (p.slot, p.incarnation) not in joined}
        living = {m.slot for m in self.servers()}
        inconsistent = [m for m in placement.mirrors if m.id in protection.inconsistent]
        mirrors = [m for m in placement.mirrors if m.at not in stale and m not in inconsistent]
        # Who was to make its partitions of one has nothing now to make them of.
        made = [(b, protection.missing[b].how, m) for m in inconsistent for b in m.members if b in protection.missing]
        of = (How.PROMOTE, How.RECONSTRUCT, How.HAND_OVER)
        cut = {b for b, how, m in made if how in of and placement.owner[b] == m.at}
        return PlacementBuilder(
            code=self.code,
            version=placement.version + 1,
            routing=placement.route,
            living=living,
            owner=list(placement.owner),
            mirrors=mirrors,
            ready=set(protection.ready) & {m.id for m in mirrors},
            missing=dict(protection.missing),
            snapshots=dict(placement.snapshots),
            next_id=protection.mirrors + 1,
            stuck=frozenset(protection.stuck) | cut,
            empties=self.job.rules.empties,
            flows=self.job.rules.flows,
            leaving=frozenset(protection.leaving) if self.job.rules.ranks else frozenset(),
            keeps=self.job.rules.keeps,
            awaits=self.job.rules.awaits,
            awaited=self.protection.awaited_until > 0.0,
        )

    def may_begin_again(self) -> bool:
        """Whether everything that was ever trained could be trained again: nothing was released."""
        nothing = not self.shards.released and not self.checkpoints.resumed
        return nothing and (self.code.m > 0 or has_checkpoints(self.job.spec))

    def on_its_way_back(self, place: PsPlace) -> bool:
        """A later life of a ps of the map is there, its loss was never told (its agent says it runs, or a journal's
        tail was lost): its hello says what it holds."""
        record = self.members.servers.get(place.slot)
        return (
            record is not None
            and record.running
            and record.member.incarnation > place.incarnation
            and record.member.address is None
        )

    def awaits_ps(self, at: float) -> bool:
        """Return whether a ps is being started in the place of a lost one, and may still be waited for."""
        servers = self.members.servers.values()
        starting = any(s.running and not s.stopping and s.member.address is None for s in servers)
        return starting and at < self.protection.awaited_until

    def early(self) -> set[Slot]:
        """Ps that have joined and wait for others of their wave: each plan of its own would move partitions twice."""
        protection, servers = self.protection, self.members.servers
        joined = [s for slot in protection.wave if (s := servers.get(slot)) is not None]
        records = [s for s in joined if s.running and not s.stopping]
        if all(s.member.address is not None for s in records):
            return set()
        return {s.member.slot for s in records if s.member.slot not in protection.over}

    def snapshot_of(self, partition: PartitionId) -> int | None:
        """Return the checkpoint that a partition may fall back to; None: there is none."""
        found = self.checkpoints.newest_snapshot(partition)
        return found[0] if found is not None else None

    def at_rest(self) -> bool:
        """Return whether everything is where it shall be."""
        protection = self.protection
        # (the slot of one that was emptied may stay empty for good)
        emptied = any(self.members.servers[slot].running for slot in protection.leaving)
        if protection.placement is None or protection.layout is None or protection.missing or emptied or self.early():
            return False
        placed = protection.placement.owner == protection.layout.owner
        return placed and not self.building() and not under_way(self.builder())

    def may_move(self, partition: PartitionId, slot: Slot) -> bool:
        """Whether this ps may have the partition: it serves, and has nothing else of its stripe."""
        layout, code = self.protection.layout, self.code
        if layout is None or slot not in self.protection.over or not 0 <= partition < len(layout.owner):
            return False
        if not code.m:
            return slot != layout.owner[partition]
        stripe = partition // code.k
        return slot not in layout.stripe(code, stripe) and slot not in self._closed(stripe, partition, self.limits())

    def _closed(self, stripe: int, partition: PartitionId, limits: tuple[Limit, ...]) -> set[Slot]:
        """Return ps to which this partition of the stripe cannot go, for the other units that they or their machines
        have."""
        layout = self.protection.layout
        assert layout is not None
        units = layout.stripe(self.code, stripe)
        del units[partition - stripe * self.code.k]
        return closed_slots(units, limits)

    def closed_to(self, slot: Slot) -> tuple[PartitionId, ...]:
        """Return partitions of others of which this ps has another unit of the stripe, or a mirror; or its machine too
        many."""
        layout, code = self.protection.layout, self.code
        if layout is None or not code.m:
            return ()
        out: list[PartitionId] = []
        limits = self.limits()
        for stripe in range(len(layout.sites)):
            here = slot in layout.stripe(code, stripe)
            if here or limits:
                members = members_of(code, stripe, len(layout.owner))
                others = [b for b in members if layout.owner[b] != slot]
                out += [b for b in others if here or slot in self._closed(stripe, b, limits)]
        return tuple(out)

    def unacknowledged(self, acks: tuple[tuple[Slot, Incarnation], ...], route: int = 0) -> str:
        """Return "" if these acknowledgements, by the map with this ``route`` (0: not told), count; else what is wrong
        with them, in words."""
        maps = self.protection.maps
        if 0 < route < self.protection.counts_from:
            return f"it was acknowledged by map v{route}, from before a loss that cost something"
        if not maps:
            return "no ps has joined"
        for known in reversed(maps):
            if not known.by(acks):
                return ""
        return maps[-1].by(acks)

    def levels(self) -> dict[str, int]:
        """Return partitions by level of protection: "full", "less", "none"; empty before the first map."""
        return level_counts(self.builder()) if self.protection.placement is not None else {}

    def moving(self) -> int:
        """Return partitions on their way to another ps, the one where they are being alive."""
        if self.protection.placement is None:
            return 0
        handed = sum(p.how is How.HAND_OVER for p in self.protection.missing.values())
        return len(under_way(self.builder())) + handed

    def rebuilding(self) -> int:
        """Return partitions that their owner does not hold yet, the old one being dead."""
        return sum(p.how is not How.HAND_OVER for p in self.protection.missing.values())

    def building(self) -> int:
        """Return mirrors of stripes that do not have everything yet."""
        placement = self.protection.placement
        mirrors = placement.mirrors if placement is not None else ()
        whole = set(self.protection.ready) - set(self.protection.inconsistent)
        return sum(m.kind is MirrorKind.PARITY and m.id not in whole for m in mirrors)

    def empty(self, slot: Slot) -> bool:
        """Return whether nothing is lost when this ps ends."""
        placement = self.protection.placement
        if placement is None:
            return True
        return (
            slot not in placement.owner
            and not placement.mirrors_at(slot)
            and all(p.source != slot for p in self.protection.missing.values())
        )

    def exposed(self, slots: Collection[Slot]) -> int:
        """Return how many partitions of these ps would be lost if all ps that leave were lost now."""
        builder = self.builder()
        found = lost_with(builder, {*slots, *self.protection.leaving})
        return sum(builder.owner[b] in slots for b in found)

    def left_at(self, slot: Slot) -> int:
        """Return partitions and mirrors that are still there."""
        placement = self.protection.placement
        return 0 if placement is None else len(placement.owned_by(slot)) + len(placement.mirrors_at(slot))


class PartitionPart:
    """Is the base of what changes :class:`Protection`."""

    __slots__ = ("checkpoints", "job", "members", "protection", "reader", "shards")

    def __init__(self, reader: PartitionReader) -> None:
        self.reader, self.protection, self.checkpoints = reader, reader.protection, reader.checkpoints
        self.job, self.members, self.shards = reader.job, reader.members, reader.shards
