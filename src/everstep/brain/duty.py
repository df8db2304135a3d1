"""Keeps the duty of the chief: the one worker that evaluates and saves, and what the job's script does once and not
again.

Theory. What stands behind the last loop is part of the script, so the job is done only when the script of the chief has
ended well. The chief is a duty and not a number: it belongs to a slot, so that the process that replaces a lost chief
inherits it; and another worker gets it when it asks while the chief is lost, is leaving, or lacks the final state. A
process that was told that it is the chief stays so while it runs: no two scripts save at a time.
"""

from __future__ import annotations

import msgspec

from everstep.brain.members import Members, SlotRecord
from everstep.ids import Incarnation, Slot
from everstep.model.member import MemberState

MAX_RERUNS = 3  # of a script, since no chief's had ended well
ONCE_KEYS = 10_000  # of ``job.once``
NOT_ASKED, CHIEF, NOT_CHIEF = 0, 1, -1


class Claim(msgspec.Struct, array_like=True):
    """Who does, or has done, what may be done once."""

    slot: Slot
    incarnation: Incarnation
    done: bool = False


class Duty(msgspec.Struct, rename={"confirmed": "told"}):
    """Is the chief's duty. ``slot``: whose duty it is, -1: nobody's yet. ``confirmed``: the life in that slot that was
    told so last, 0: none. ``done``: the script of a chief has ended well. ``reruns``: scripts started again because
    none had. ``once``: by key, what ``job.once`` guards."""

    slot: Slot = Slot(-1)
    confirmed: Incarnation = Incarnation(0)
    done: bool = False
    reruns: int = 0
    once: dict[str, Claim] = {}

    def __repr__(self) -> str:
        return f"<duty of {f'worker:{self.slot}' if self.slot >= 0 else 'nobody'}{' done' if self.done else ''}>"

    def ask(self, members: Members, record: SlotRecord, final: frozenset[Slot], trained: bool) -> bool:
        """Return whether the process of ``record`` is the chief. ``final``: workers that have the state that all end
        with, where that is known; ``trained``: all data is."""
        if not self.done and not self._keeps(members, record, final, trained):
            there = [s for s in _able(members) if not final or s in final]
            self.slot = (
                record.member.slot if self.slot >= 0 or record.stopping else min(there, default=record.member.slot)
            )
        chief = not self.done and self.slot == record.member.slot
        if chief:
            self.confirmed = record.member.incarnation
        if record.chief != CHIEF:
            record.chief = CHIEF if chief else NOT_CHIEF
        return chief

    def _keeps(self, members: Members, asker: SlotRecord, final: frozenset[Slot], trained: bool) -> bool:
        """Return whether the duty stays where it is although ``asker`` would like to know."""
        holder = members.workers.get(self.slot)
        if holder is asker:
            return True
        if holder is None or not holder.running or holder.stopping:
            return False
        lost = holder.member.state is MemberState.STARTING and 0 < self.confirmed < holder.member.incarnation
        behind = asker.member.slot in final and holder.member.slot not in final
        behind = behind and (trained or self.confirmed != holder.member.incarnation)
        return not (lost or behind)

    def ended_well(self, members: Members, record: SlotRecord) -> None:
        """The script of this process has come to its end."""
        if self.done:
            return
        holder = members.workers.get(self.slot)
        gone = holder is None or holder.stopping or not (holder.running or holder.waiting)
        if holder is not record and gone:
            others = [s for s in _able(members) if s != record.member.slot]
            if self.slot < 0:
                self.slot = (
                    min((*others, record.member.slot)) if record.chief != NOT_CHIEF else min(others, default=self.slot)
                )
            elif record.chief == CHIEF:
                self.slot = record.member.slot
        if self.slot == record.member.slot and record.chief != NOT_CHIEF:
            self.done = True

    def undone(self) -> None:
        """What the chief's script ended with does not count any more: training goes on."""
        self.done = False

    def settle(self, members: Members) -> None:
        """Nobody runs any more: whether a script that has ended well was the chief's, or may have been."""
        ended = [record for record in members.workers.values() if record.finished]
        self.done = self.done or any(record.chief != NOT_CHIEF for record in ended)

    # ------------------------------------------------------------ what may be done once

    def claim(self, members: Members, key: str, record: SlotRecord) -> bool:
        """Whether the process of ``record`` is to do it: it was not done, and nobody who lives is at it."""
        known, m = self.once.get(key), record.member
        if known is not None and (known.done or self._lives(members, known)):
            return not known.done and (known.slot, known.incarnation) == (m.slot, m.incarnation)
        self.once[key] = Claim(m.slot, m.incarnation)
        return True

    def _lives(self, members: Members, claim: Claim) -> bool:
        record = members.workers.get(claim.slot)
        return record is not None and record.running and record.member.incarnation == claim.incarnation

    def did(self, key: str, record: SlotRecord) -> None:
        self.once[key] = Claim(record.member.slot, record.member.incarnation, done=True)


def _able(members: Members) -> list[Slot]:
    """Workers that run, or are being started, and stay."""
    return [slot for slot, record in members.workers.items() if record.running and not record.stopping]
