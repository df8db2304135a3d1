"""Says when the disk of a ps takes no more rows, and when it takes them again."""

from __future__ import annotations

import os
from collections.abc import Mapping

from everstep.ids import Slot
from everstep.model.decision import Decision


class ColdRows:
    """Holds what the ps said last; ``beat`` with each of their beats."""

    def __init__(self, cold_dir: str) -> None:
        self._cold_dir = cold_dir
        self._errors: dict[Slot, int] = {}

    def __repr__(self) -> str:
        return f"<cold rows: {self._errors}>"

    def beat(self, slot: Slot, readings: Mapping[str, float]) -> Decision | None:
        """Return what is to be said of it, if anything is new."""
        error, before = int(readings.get("cold_error", 0)), self._errors.get(slot, 0)
        self._errors[slot] = error
        if error == before:
            return None
        if not error:
            return Decision("cold tier", f"cold_dir {self._cold_dir} takes rows again", {"errno": 0})
        words = f"cold_dir {self._cold_dir}: {os.strerror(error)}: rows stay in memory; make room there"
        return Decision("cold tier", words, {"errno": error}, ("end the ps: no row is lost",))
