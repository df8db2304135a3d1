"""Records the steps that a group committed: how far the data is, and which generation has met."""

from __future__ import annotations

import msgspec

from everstep.brain.concerns.generations import Generations
from everstep.brain.concerns.group_reader import GroupPart, GroupReader
from everstep.brain.events import Event, InstructionType, Note, StepsCommitted, StopProcess
from everstep.brain.group import STOP_AFTER_S, Skip, Stint
from everstep.model.decision import Decision
from everstep.model.group import Committed

STEPS_REMEMBERED = 1024  # ends of committed ranges, against which repeats are checked


class CommittedSteps(GroupPart):
    """Takes told steps in; they continue each other without a gap."""

    __slots__ = ("_generations",)

    def __init__(self, reader: GroupReader, generations: Generations) -> None:
        super().__init__(reader)
        self._generations = generations

    def committed(self, e: StepsCommitted, event: Event) -> tuple[list[InstructionType], str]:
        """Take committed steps in. Returns what follows, and the error if they cannot be."""
        out: list[InstructionType] = []
        groups = self.group_state
        before, confirmed = groups.step, groups.confirmed
        for steps in e.steps:
            if steps.generation < groups.lineage:
                continue  # of a lineage that has ended
            error = self._commit(steps, out)
            if error:
                return out, f"bug in everstep: {error}, said by {event.sender}"
            if steps.generation > groups.confirmed:
                out += self.confirm(steps.generation)
        if groups.step > before:
            group = groups.group
            if group is not None and group.generation == groups.confirmed and groups.step > groups.streak.furthest:
                groups.streak.blamed = 0
        held = groups.step > before and groups.group is not None and bool(groups.group.hold)
        if groups.confirmed != confirmed or (held and self.reader.data_done()):
            # newcomers have the state for certain now; a group on hold waits for nothing any more
            out += self._generations.settle(event.at)
        return out, ""

    def _commit(self, c: Committed, out: list[InstructionType]) -> str:
        groups = self.group_state
        what = f"steps {c.first}..{c.last} of generation {c.generation}"
        if not 0 <= c.dataset < len(self.shards.datasets):
            return f"{what}: dataset {c.dataset} is not registered"
        plan = self.shards.datasets[c.dataset].plan
        if not (0 <= c.first <= c.last and 0 <= c.lo < c.hi <= plan.samples):
            return f"{what}: positions [{c.lo}, {c.hi}) of {plan.samples}"
        if max(c.generation, c.agreed) > groups.generations:
            return f"{what}: there are only {groups.generations} generations"
        after = _turned(c.epoch, c.hi, plan.samples)
        ends = {c.first: (c.dataset, c.epoch, c.lo), c.last + 1: (c.dataset, *after)}
        for step, place in ends.items():
            known = groups.history.boundaries.get(step)
            if known is not None and known[1:] != place[1:] and known[0] == place[0]:
                return f"{what}: step {step} is at {_place(place)} there, but was at {_place(known)}"
        if c.last < groups.step:
            return ""  # known
        if c.first > groups.step:
            return f"{what}: step {groups.step} is missing before them"
        at = groups.positions.get(c.dataset, (0, 0))
        if c.first == groups.step:
            if at != (c.epoch, c.lo):
                return f"{what} begin at {_place(ends[c.first])}, but step {groups.step} is at e{at[0]} {at[1]}"
        elif not (at[0] == c.epoch and c.lo < at[1] < c.hi and groups.history.stints[-1].dataset == c.dataset):
            return f"{what} are e{c.epoch} [{c.lo}, {c.hi}), but step {groups.step} is at e{at[0]} {at[1]}"
        self._advance(c, at[1], after, out)
        return ""

    def _advance(self, c: Committed, lo: int, after: tuple[int, int], out: list[InstructionType]) -> None:
        groups = self.group_state
        self._leave_behind(c.agreed)
        if groups.history.stints and groups.history.stints[-1].dataset == c.dataset:
            groups.history.stints[-1].end = after
        else:
            groups.history.stints.append(Stint(c.first, c.dataset, (c.epoch, lo), after))
        groups.step = c.last + 1
        groups.positions[c.dataset] = after
        groups.history.boundaries[c.first] = (c.dataset, c.epoch, c.lo)
        groups.history.boundaries[groups.step] = (c.dataset, *after)
        while len(groups.history.boundaries) > STEPS_REMEMBERED:
            del groups.history.boundaries[next(iter(groups.history.boundaries))]
        skipped = 0
        for a, b in c.skipped:
            a, b = max(a, lo), min(b, c.hi)
            if a < b:
                skipped += b - a
                groups.history.skips.append(Skip(c.dataset, c.epoch, a, b))
        if skipped:
            name = self.shards.datasets[c.dataset].plan.name
            words = f"'{name}' epoch {c.epoch}: steps in [{c.lo}, {c.hi}) gave gradients that are not finite"
            policy = self.job.spec.nonfinite
            out.append(Note("", Decision("samples skipped", words, {"samples": skipped, "policy": policy})))
        if self.shards.reach(c.dataset, c.epoch, c.hi, c.hi - lo - skipped):
            dataset = self.shards.datasets[c.dataset]
            done = dataset.epochs[c.epoch].samples_done
            words = f"'{dataset.plan.name}' epoch {c.epoch}: all {dataset.plan.samples} samples, up to step {c.last}"
            out.append(Note("", Decision("epoch finished", words, {"samples": done, "steps": groups.step})))

    def _leave_behind(self, agreed: int) -> None:
        """Note that whoever was left out of the group of generation ``agreed`` may lack the steps that are told now."""
        leavers = self.group_state.leavers
        if any(x.generation <= agreed and not x.behind for x in leavers):
            replace = msgspec.structs.replace
            self.reader.set_leavers([replace(x, behind=x.behind or x.generation <= agreed) for x in leavers])

    def confirm(self, generation: int) -> list[InstructionType]:
        """The members have changed over to ``generation``: who was left out of it trains no more."""
        groups = self.group_state
        groups.confirmed = generation
        out: list[InstructionType] = []
        changed = [x for x in groups.leavers if x.generation <= generation]
        self.reader.set_leavers([x for x in groups.leavers if x.generation > generation])
        for x in changed:
            record = self.reader.living(x.slot, x.incarnation)
            if record is not None and record.stopping:
                why = Decision("stop", f"group {generation} goes on without it")
                m = record.member
                out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, STOP_AFTER_S, why))
        if groups.group is not None:
            for member in groups.group.members:
                if (record := self.reader.living(member.slot, member.incarnation)) is not None:
                    record.streak = 0
        return out


def _turned(epoch: int, position: int, samples: int) -> tuple[int, int]:
    """The end of an epoch is the begin of the next."""
    return (epoch + 1, 0) if position == samples else (epoch, position)


def _place(place: tuple[int, int, int]) -> str:
    return f"dataset {place[0]} e{place[1]} {place[2]}"
