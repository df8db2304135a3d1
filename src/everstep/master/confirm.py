"""With parity that is eager or may lag: up to when everything is on all mirrors, told by the ps' heartbeats.

A ps tells how many differences it has made (``outbox_ticket``) and up to which all mirrors have them (``outbox_done``);
where mirrors may lag, these are the numbers of the changes that it has opened (``ps/lag_flusher.py``).
What it had applied when it wrote a beat is confirmed once a later beat's ``outbox_done`` has reached that beat's
``outbox_ticket``. When that was, by the master's clock, is not known exactly: it was after the beat before was
received, unless that one was on its way for longer than ``SLACK_S``; but a ps that is silent for so long is lost.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

from everstep.brain.brain import Brain
from everstep.brain.checkpoints import waits_for_mirrors
from everstep.brain.events import FactType, ShardsConfirmed
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, Slot

SLACK_S = 30.0
EVERY_S = 1.0
_REMEMBERED = 600  # beats of one ps


class _Life:
    """Is one process: beats not confirmed yet, ``(ticket, not before)``, and up to when all is."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.beats: collections.deque[tuple[float, float]] = collections.deque(maxlen=_REMEMBERED)
        self.last_at = 0.0
        self.until = 0.0


class Confirmations:
    """Confirms what all mirrors have; ``tell(event)`` goes to the brain, by the journal."""

    def __init__(self, brain: Brain, spec: JobSpec, tell: Callable[[FactType], object]) -> None:
        self._brain, self._tell = brain, tell
        self._needed = waits_for_mirrors(spec)
        self._slack_s = max(SLACK_S, 2 * spec.lost_after_s)
        self._lives: dict[Slot, _Life] = {}

    def __repr__(self) -> str:
        return f"<confirmations of {len(self._lives)} ps>"

    def beat(self, slot: Slot, incarnation: Incarnation, readings: Mapping[str, float], at: float) -> None:
        """A ps' heartbeat was received at ``at``."""
        if not self._needed or "outbox_ticket" not in readings:
            return
        life = self._lives.get(slot)
        if life is None or life.incarnation != incarnation:
            life = self._lives[slot] = _Life(incarnation)
        if life.last_at:
            life.beats.append((readings["outbox_ticket"], life.last_at))
        life.last_at = at
        while life.beats and life.beats[0][0] <= readings["outbox_done"]:
            life.until = life.beats.popleft()[1]

    def tick(self, at: float) -> None:
        """Tell the brain if that releases something."""
        placement, brain = self._brain.placement, self._brain
        if not self._needed or placement is None or not brain.shards.releasing or brain.job.over:
            return
        until = []
        for place in placement.servers:
            life = self._lives.get(place.slot)
            if life is None or life.incarnation != place.incarnation:
                return
            until.append(life.until)
        before = min(until, default=0.0) - self._slack_s
        if before < brain.checkpoints.confirmed + EVERY_S:
            return
        if any(record.at < before for record in brain.shards.releasing.values()):
            self._tell(ShardsConfirmed(before))
