"""What ps tell of partitions and mirrors: what is whole there, torn, or cannot be had."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.brain.concerns.partition_reader import PartitionPart
from everstep.brain.events import InstructionType, LoadFailed, MirrorsReady, Note, PartitionsReady
from everstep.brain.protection import Inputs
from everstep.ids import PartitionId, Slot
from everstep.model.decision import Decision
from everstep.model.reasons import Arrival
from everstep.model.snapshot import Holdings
from everstep.policies.hot import HotMove
from everstep.policies.stripes import StripeLayout


class PartitionReports(PartitionPart):
    """Keeps what is where, and takes wishes for other places."""

    __slots__ = ()

    def mirrors_ready(self, slot: Slot, mirrors: Iterable[int]) -> bool:
        """Return whether this is news."""
        placement, protection = self.protection.placement, self.protection
        if placement is None:
            return False
        here = {m.id for m in placement.mirrors_at(slot)}
        news = [m for m in mirrors if m in here and m not in protection.ready]
        protection.ready = sorted([*protection.ready, *news])
        return bool(news)

    def covers(self) -> list[InstructionType]:
        """What may be released when every partition has all its mirrors for the first time: until then its ps may take
        it with it, and it must be possible to train all of it again."""
        if self.checkpoints.covered or self.protection.placement is None or self.protection.missing:
            return []
        builder = self.reader.builder()
        rows = builder.rows()
        wanted = [(j, r) for j in range(builder.stripes) for r in range(builder.code.m)]
        if not all(any(m.id in builder.ready for m in rows.get(w, ())) for w in wanted):
            return []
        return self.checkpoints.cover(self.job, self.shards)

    def partitions_ready(self, slot: Slot, version: int, partitions: Iterable[PartitionId]) -> list[PartitionId]:
        """Return those that are news. ``version``: of the placement that gave them, or a later one."""
        placement, missing = self.protection.placement, self.protection.missing
        if placement is None:
            return []
        news = [b for b in partitions if b in missing and placement.owner[b] == slot and version >= missing[b].version]
        for partition in news:
            del missing[partition]
        return news

    def holds(self, slot: Slot, holds: Holdings) -> None:
        """Take what a ps said in its hello."""
        self.mirrors_ready(slot, holds.mirrors)
        self.partitions_ready(slot, holds.placement, holds.partitions)

    def reported(self, slot: Slot, e: MirrorsReady | PartitionsReady) -> list[InstructionType]:
        """A ps tells what is whole there."""
        if isinstance(e, MirrorsReady):
            self.mirrors_ready(slot, e.mirrors)
            return self._inconsistent(slot, e)
        if e.how is Arrival.STUCK:
            return self._stuck(slot, e)
        news = self.partitions_ready(slot, e.placement, e.partitions)
        if not news:
            return []
        if self.protection.missing:
            return []
        inputs: Inputs = {"partitions": len(news), "how": e.how}
        words = f"every partition is whole where the map has it (the last ones at ps:{slot}: {e.how})"
        return [Note("", Decision("partitions ready", words, inputs))]

    def _inconsistent(self, slot: Slot, e: MirrorsReady) -> list[InstructionType]:
        """Mirrors are not to be trusted: from now on none is there, and the next map has others in their place."""
        placement, protection = self.protection.placement, self.protection
        named = {m.id for m in placement.mirrors} if placement is not None else set()
        news = sorted((set(e.inconsistent) & named) - set(protection.inconsistent))
        if not news:
            return []
        protection.inconsistent = sorted([*protection.inconsistent, *news])
        words = f"{len(news)} mirrors lack differences of their members: others are made in their place"
        why = Decision("mirrors torn", words, {"mirrors": len(news)}, ("go on with them: they would give wrong rows",))
        return [Note(f"ps:{slot}", why)]

    def _stuck(self, slot: Slot, e: PartitionsReady) -> list[InstructionType]:
        """A ps has no way to get partitions: they are taken for lost there, if that is about what was last ordered."""
        placement, missing = self.protection.placement, self.protection.missing
        if placement is None:
            return []
        stuck = sorted(
            b
            for b in set(e.partitions)
            if 0 <= b < placement.partitions
            and placement.owner[b] == slot
            and e.placement >= (missing[b].version if b in missing else placement.version)
        )
        others = [b for b in self.protection.stuck if placement.owner[b] != slot] if self.job.rules.recalls else []
        self.protection.stuck = sorted({*stuck, *others})
        if not stuck:
            return []
        words = f"it has no way to get {len(stuck)} partitions that placement {e.placement} gave it"
        why = Decision("partitions stuck", words, {"partitions": len(stuck)}, ("wait: nothing more would come",))
        return [Note(f"ps:{slot}", why)]

    def load_failed(self, slot: Slot, e: LoadFailed) -> list[InstructionType]:
        """A ps could not load a partition: it is taken for lost there, if that is about what was last ordered."""
        if (e.partition, e.checkpoint) not in self.reader.loading(slot, e.placement):
            return []
        self.protection.stuck = sorted({*self.protection.stuck, e.partition})
        return self.checkpoints.load_failed(e.checkpoint, f"ps:{slot}", e.error)

    def spread(self, moves: Iterable[HotMove]) -> list[HotMove]:
        """Ask for these partitions elsewhere: those for which it is possible."""
        done: list[HotMove] = []
        for move in moves:
            layout = self.protection.layout
            assert layout is not None
            if self.reader.may_move(move.partition, move.target) and layout.owner[move.partition] == move.source:
                owner = list(layout.owner)
                owner[move.partition] = move.target
                self.protection.layout = StripeLayout(tuple(owner), layout.sites)
                done.append(move)
        return done
