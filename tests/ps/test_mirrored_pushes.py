"""What a ps tells of its mirrors: never more than they have, whatever comes between two looks."""

from __future__ import annotations

import random

import pytest

from everstep.ids import ShardKey
from everstep.ps.mirrored_pushes import NOTHING, MirroredPushes, SeenPush


class Ps:
    """A ps of three partitions. Positions up to which the ps and its mirrors have them; numbers of open changes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pushes = MirroredPushes()
        self.have, self.safe = [0, 0, 0], [0, 0, 0]
        self.opened: dict[int, int] = {}
        self.changes = self.position = 0

    def push(self) -> None:
        """The next step, or one that some partitions have already."""
        lo = min(self.have)
        self.position = max(self.position, lo + 1)
        hi = lo + 1
        for b, have in enumerate(self.have):
            if have < hi:
                self.have[b] = hi
                if b not in self.opened:
                    self.changes += 1
                    self.opened[b] = self.changes
        self.pushes.pushed((ShardKey(7), hi))

    def flush(self) -> None:
        for b in range(3):
            if self.rng.random() < 0.6:
                self.safe[b] = self.have[b]
                self.opened.pop(b, None)

    def came(self) -> None:
        """A partition comes from its mirror."""
        b = self.rng.randrange(3)
        self.have[b] = self.safe[b]
        self.opened.pop(b, None)
        self.pushes.came()

    def some(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            self.rng.choice((self.push, self.push, self.flush, self.came))()
            self.check()

    def look(self) -> None:
        seen = self.pushes.newest()
        self.some()
        changes, closed = self.changes, min(self.opened.values(), default=self.changes + 1) - 1
        self.some()
        self.pushes.made(seen, changes, 0)
        self.pushes.confirmed(closed, 0)
        self.check()

    def check(self) -> None:
        assert self.pushes.mirrored[1] <= min(self.safe)

    def run(self) -> int:
        """Return up to where it has told."""
        most = 0
        for _ in range(60):
            self.some()
            self.look()
            most = max(most, self.pushes.mirrored[1])
        return most


@pytest.mark.parametrize("seed", range(200))
def test_no_more_is_told_than_mirrors_have(seed: int) -> None:
    Ps(seed).run()


def test_it_is_told() -> None:
    assert sum(Ps(seed).run() for seed in range(50)) > 500


def _sees_too_late(self: MirroredPushes, seen: SeenPush, change: int, ticket: int) -> None:
    _made(self, self.newest(), change, ticket)


def _remembers(self: MirroredPushes) -> None:
    """What was seen before a partition came counts on."""
    self._life += 1
    self._newest = self.mirrored = NOTHING


def _takes_what_was_seen_before(self: MirroredPushes, seen: SeenPush, change: int, ticket: int) -> None:
    _made(self, SeenPush(seen.end, self._life), change, ticket)


_made = MirroredPushes.made


@pytest.mark.parametrize(
    ("name", "planted"),
    [("made", _sees_too_late), ("came", _remembers), ("made", _takes_what_was_seen_before)],
)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, name: str, planted: object) -> None:
    monkeypatch.setattr(MirroredPushes, name, planted)
    with pytest.raises(AssertionError):
        for seed in range(200):
            Ps(seed).run()


def test_what_waits_in_the_outbox_is_not_told() -> None:
    """Such as what another ps had not sent when it handed a partition over."""
    pushes = MirroredPushes()
    pushes.pushed((ShardKey(1), 10))
    pushes.made(pushes.newest(), 3, 8)
    pushes.confirmed(3, 7)
    assert pushes.mirrored == NOTHING
    pushes.confirmed(3, 8)
    assert pushes.mirrored == (ShardKey(1), 10)
