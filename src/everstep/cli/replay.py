"""``everstep replay``: run the journal through the brain again and compare what it wants with what it wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import InstructionType
from everstep.brain.shapes import Shapes
from everstep.storage.journal import agrees, digest_of, read_journal, shapes_of

JOURNAL_FILE = "journal.sqlite"


class Difference(msgspec.Struct, frozen=True):
    """Is the first event whose instructions are not those of the journal. ``got``: what this brain wants."""

    seq: int
    event: str
    expected: str  # digest, hex
    actual: str
    got: tuple[str, ...]


class ReplayResult(msgspec.Struct, frozen=True):
    """``events`` were replayed; ``difference`` is None if all agreed. ``state``: the brain at the end, in words."""

    events: int
    masters: int
    state: str
    difference: Difference | None = None

    @property
    def ok(self) -> bool:
        return self.difference is None

    def lines(self) -> list[str]:
        """Return the lines for a terminal."""
        if self.difference is None:
            masters = f" of {self.masters} masters" if self.masters > 1 else ""
            return [f"{self.events} events{masters} replayed: every instruction is the same", self.state]
        d = self.difference
        return [
            f"event {d.seq} gives other instructions than the journal says ({self.events - 1} before it agree)",
            f"  event:    {d.event}",
            f"  expected: {d.expected}",
            f"  actual:   {d.actual}",
            *(f"    {line}" for line in d.got or ("(nothing)",)),
        ]


def replay(run_dir: Path) -> ReplayResult:
    """Replay ``run_dir``'s journal from its first event, also of a running job; stops at the first difference.

    Raises ConfigError (no journal there), PlatformError (unreadable)."""
    brain = Brain()
    count = 0
    entries = read_journal(run_dir / JOURNAL_FILE)
    shapes: Callable[[int], Shapes] | None = None
    for seq, event, expected in entries:
        shapes = shapes or shapes_of(run_dir / JOURNAL_FILE)
        instructions: list[InstructionType] = brain.handle(event)
        count += 1
        if not agrees(instructions, expected, shapes(seq)):
            got = tuple(repr(i) for i in instructions)
            found = Difference(seq, repr(event), expected.hex(), digest_of(instructions).hex(), got)
            return ReplayResult(count, brain.job.master_incarnation, repr(brain), found)
    brain.validate()
    return ReplayResult(count, brain.job.master_incarnation, repr(brain))
