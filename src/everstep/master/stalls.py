"""Workers that wait in vain for a ps: said once when it has lasted, and once when it is over.

A worker waits by itself for partitions that are on their way, and needs nobody; but one that waits for long is what a
person wants to know, with the name of the ps. Soft state: a new master says it again.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.ids import Incarnation
from everstep.model.decision import Decision
from everstep.model.member import MemberKey

REPORT_AFTER_S = 10.0


class Stalls:
    """Finds workers that wait in vain; it is fed with each worker's heartbeats (``stalled_ps``, ``stalled_s``; see
    api/ps_engine.py)."""

    def __init__(self) -> None:
        self._reported: dict[MemberKey, tuple[Incarnation, int, float]] = {}  # life, the ps, longest so far

    def __repr__(self) -> str:
        return f"<stalls of {len(self._reported)} workers>"

    def beat(self, key: MemberKey, incarnation: Incarnation, readings: Mapping[str, float]) -> Decision | None:
        """Return what is to be told of this worker now, if anything."""
        slot, waited_s = int(readings.get("stalled_ps", -1)), readings.get("stalled_s", 0.0)
        reported = self._reported.get(key)
        if reported is not None and reported[0] != incarnation:
            reported = None
            del self._reported[key]
        if reported is None:
            if slot < 0 or waited_s < REPORT_AFTER_S:
                return None
            self._reported[key] = (incarnation, slot, waited_s)
            lacks = "has had another map than it, or lacked partitions that the map gives it"
            words = f"for {waited_s:.0f} s ps:{slot} {lacks}"
            return Decision("waits for a ps", words, {"ps": slot, "waited_s": round(waited_s, 1)})
        if slot == reported[1] and waited_s >= reported[2]:
            self._reported[key] = (incarnation, slot, waited_s)
            return None
        del self._reported[key]
        words = f"ps:{reported[1]} answers again, after {reported[2]:.0f} s"
        return Decision("goes on", words, {"ps": reported[1], "waited_s": round(reported[2], 1)})
