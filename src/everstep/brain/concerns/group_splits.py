"""Says how a step of a group is cut and divided."""

from __future__ import annotations

import msgspec

from everstep.brain.concerns.group_reader import GroupPart
from everstep.brain.events import InstructionType, PublishGroup
from everstep.brain.group import Adjust
from everstep.ids import Incarnation, Slot
from everstep.model.decision import Decision
from everstep.model.group import GroupMember, StepSplit
from everstep.model.plan import AdjustAccum, AdjustBatch, AdjustRate
from everstep.policies.stragglers.shares import even


class StepSplits(GroupPart):
    """Divides steps among the members, as plans say."""

    __slots__ = ()

    def cannot_divide(self, batch: dict[Slot, int]) -> str:
        """Return why the group's steps cannot be divided so; "": they can."""
        group = self.reader.view()
        if group is None or group.hold:
            return "there is no group that trains"
        inside = {m.slot for m in group.members}
        missing = [slot for slot in batch if slot not in inside]
        if missing:
            return f"worker:{missing[0]} is not in the group"
        if len(batch) == group.size and sum(batch.values()) != self.reader.samples():
            return f"a step has {self.reader.samples()} samples now, not {sum(batch.values())}"
        return ""

    def cannot_replace(self, slot: Slot, incarnation: Incarnation) -> str:
        """Return why this member should not be asked to leave now, for another one; "": it may. Only from a group at
        rest of which enough others have the state for certain: nobody needs the replacement to come."""
        groups, group = self.group_state, self.reader.view()
        if group is None or group.hold or group.rank(slot, incarnation) < 0:
            return f"worker:{slot} is in no group that trains"
        if groups.leavers or group.joining or groups.confirmed < group.generation:
            return "the group is changing"
        if self.reader.data_done():
            return "all data is trained"
        rest = [m for m in group.members if m.slot != slot and self.reader.holds(m) and not self.reader.leaves(m)]
        if len(rest) < max(1, self.job.spec.min_workers):
            return f"{len(rest)} would be left of at least {max(1, self.job.spec.min_workers)} workers"
        return ""

    def adjust(self, actions: list[Adjust], why: Decision) -> list[InstructionType]:
        """Divide steps as these actions say."""
        group = self.group_state.group
        assert group is not None
        shares: dict[Slot, int] = {}
        passes: dict[Slot, int] = {}
        rate = group.split.rate
        for action in actions:
            match action:
                case AdjustBatch(batch=batch):
                    shares = batch
                case AdjustAccum(accum=accum):
                    passes = accum
                case AdjustRate(factor=factor):
                    rate = factor
        published = self.divide(shares, passes, rate, why)
        return [] if published is None else [published]

    def divide(
        self, shares: dict[Slot, int], passes: dict[Slot, int], rate: float, why: Decision
    ) -> PublishGroup | None:
        """The members of the group are to divide its steps so. Whoever is not named takes what it takes now; None:
        that is how it is already."""
        groups, group = self.group_state, self.group_state.group
        assert group is not None
        old, slots = group.split, [m.slot for m in group.members]
        before = old.shares or tuple(even(self.reader.samples(), group.size))
        passes_now = (0,) * group.size if shares or not old.passes else old.passes
        split = StepSplit(
            old.version,
            tuple(shares.get(slot, share) for slot, share in zip(slots, before, strict=True)),
            tuple(passes.get(slot, n) for slot, n in zip(slots, passes_now, strict=True)),
            rate,
        )
        now = StepSplit(old.version, before, old.passes or (0,) * group.size, old.rate)
        if split == now:
            return None
        groups.splits += 1
        groups.group = msgspec.structs.replace(group, split=msgspec.structs.replace(split, version=groups.splits))
        return PublishGroup(msgspec.structs.replace(groups.group, joining=self.reader.joining()), why)

    def carried(self, members: tuple[GroupMember, ...]) -> StepSplit:
        """Return the split of the group published last, for ``members``: who stays keeps its share, who comes takes a
        middle one. Passes are forgotten: they were asked for another number of samples, and may not fit into memory
        now."""
        groups = self.group_state
        old = groups.group
        if old is None or old.split == StepSplit():
            return StepSplit()
        rank = {m: r for r, m in enumerate(old.members)}
        shares = old.split.shares
        groups.splits += 1
        middle = max(1, sum(shares) // max(1, len(shares)))
        return StepSplit(
            groups.splits,
            tuple(shares[rank[m]] if m in rank else middle for m in members) if shares else (),
            (),
            old.split.rate,
        )
