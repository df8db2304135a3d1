"""What an agent does about a master that it does not hear: pure, told the time.

On another node than the master's: the node may be cut off. Then the master has given it up, and others do its work:
what runs here is ended, and the agent tries to come back for a while. On the master's own node: the master hangs. Then
it is said, and the process is replaced.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

LOOK_S: Final = 1.0
"""Between two looks."""

_PAUSE_S: Final = 3.0  # looks farther apart than this: we were stopped, and what we did not hear says nothing
REFUSED_S: Final = 20.0
"""So long nobody listens where the master was, though its machine answers: it will not come back."""


class SilenceStep(Enum):
    NOTHING = 0
    END = 1  # what runs here
    BACK = 2  # the master is heard again
    LEAVE = 3  # for good
    SAY = 4
    REPLACE = 5


class _Silence:
    """Seconds without the master, our own pauses left out."""

    def __init__(self) -> None:
        self._looked: float | None = None
        self._since = 0.0

    def of(self, at: float, unheard_s: float) -> float:
        if self._looked is None or not 0 <= at - self._looked <= _PAUSE_S:
            self._since = at
        self._looked = at
        return min(unheard_s, at - self._since)


class CutOff:
    """``limit_s``: without the master for so long, a node ends what runs on it; ``rejoin_s``: after that, its agent
    tries to come back for so long."""

    def __init__(self, limit_s: float, rejoin_s: float) -> None:
        self._limit_s, self._rejoin_s = limit_s, rejoin_s
        self._silence = _Silence()
        self._ended_at = 0.0  # 0.0: not cut off
        self.silent_s = 0.0
        self.refused = False

    def __repr__(self) -> str:
        return f"<CutOff {'since' if self._ended_at else 'no'} {self.silent_s:.0f} s>"

    def look(self, at: float, unheard_s: float, refused_s: float) -> SilenceStep:
        """``refused_s``: for so long every attempt to connect was refused by the master's machine."""
        silent_s = self._silence.of(at, unheard_s)
        if self._ended_at and unheard_s < LOOK_S:
            self._ended_at = 0.0
            return SilenceStep.BACK
        self.silent_s = max(silent_s, self.silent_s) if self._ended_at else silent_s
        if not self._ended_at:
            if silent_s < self._limit_s:
                return SilenceStep.NOTHING
            self._ended_at = at
            return SilenceStep.END
        self.refused = refused_s >= REFUSED_S
        return SilenceStep.LEAVE if self.refused or at - self._ended_at >= self._rejoin_s else SilenceStep.NOTHING


class Hung:
    """Judges the master of our own node. ``say_s``, ``replace_s``: without an answer for so long."""

    def __init__(self, say_s: float, replace_s: float) -> None:
        self._say_s, self._replace_s = say_s, replace_s
        self._silence = _Silence()
        self._announced = False
        self.silent_s = 0.0

    def __repr__(self) -> str:
        return f"<Hung {self.silent_s:.0f} s>"

    def look(self, at: float, unheard_s: float, greeted: bool) -> SilenceStep:
        """``greeted``: this very master has answered before: one that starts has a journal to read."""
        silent_s = self._silence.of(at, unheard_s) if greeted else 0.0
        if silent_s < self._say_s:
            announced, self._announced = self._announced, False
            return SilenceStep.BACK if announced and greeted else SilenceStep.NOTHING
        self.silent_s = silent_s
        if silent_s >= self._replace_s:
            self._announced = False
            return SilenceStep.REPLACE
        if not self._announced:
            self._announced = True
            return SilenceStep.SAY
        return SilenceStep.NOTHING
