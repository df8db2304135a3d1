"""What one ps asks another: wishes for contents go out together, and each has its own answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from everstep.ids import Incarnation, PartitionId, Slot
from everstep.net.messages import (
    Bad,
    DataAnswer,
    DataRequest,
    FetchContents,
    FetchLog,
    LogFetched,
    LogTaken,
    Moved,
    TransferOwnership,
)
from everstep.protect.machine import Ask
from everstep.ps.mirror_server import MirrorServer
from everstep.ps.service import PsService

PEER = (Slot(1), Incarnation(1))


class Peer:
    """The other end. ``answers``: by partition, else LogTaken; ``most``: requests on their way at once."""

    def __init__(self, answers: dict[int, DataAnswer]) -> None:
        self.answers = answers
        self.asked: list[int] = []
        self.most = 0
        self._waiting: deque[DataAnswer] = deque()

    plain_fd = -1

    def send(self, message: DataRequest, buffers: Sequence[Any] = (), *, timeout_s: float = 30.0) -> None:
        assert isinstance(message, FetchContents | FetchLog | TransferOwnership)
        self.asked.append(message.partition)
        self._waiting.append(self.answers.get(message.partition, LogTaken()))
        self.most = max(self.most, len(self._waiting))

    def receive(self, *, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]:
        return self._waiting.popleft(), memoryview(b"")

    def request(self, message: DataRequest, *, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]:
        assert not self._waiting
        self.send(message)
        return self.receive()

    def close(self) -> None: ...


def wish(partition: int) -> Ask:
    return Ask(PEER, FetchContents(1, Slot(0), Incarnation(1), 7, PartitionId(partition), "fold", sync=1))


@pytest.fixture
def mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[MirrorServer, list[int]]:
    """Of a ps of four partitions; and of which partitions its machine heard an answer."""
    (tmp_path / "audit").mkdir()
    me = PsService.create(n_partitions=4, seed=1, slot=Slot(0), incarnation=Incarnation(1), run_dir=tmp_path)
    heard: list[int] = []
    answered = lambda ask, answer, blobs=(): heard.append(ask.request.partition)  # noqa: E731
    monkeypatch.setattr(me.mirrors.machine, "answered", answered)
    return me.mirrors, heard


def test_wishes_are_on_their_way_together_and_only_those_that_were_declined_are_asked_again(
    mirrors: tuple[MirrorServer, list[int]],
) -> None:
    server, heard = mirrors
    peer = Peer({2: Moved(0), 3: Bad("no")})
    assert server._ask_all(peer, [wish(b) for b in range(5)]) == [False, False, True, True, False]
    assert peer.asked == [0, 1, 2, 3, 4] and heard == [0, 1, 4]
    assert peer.most == 5


def test_no_more_are_on_their_way_than_may_be(
    mirrors: tuple[MirrorServer, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, heard = mirrors
    monkeypatch.setattr("everstep.ps.mirror_server._ASKS_AHEAD", 3)
    peer = Peer({})
    assert server._ask_all(peer, [wish(b) for b in range(8)]) == [False] * 8
    assert heard == list(range(8)) and peer.most == 3


def test_what_is_answered_with_more_than_a_word_is_asked_alone_and_in_its_place(
    mirrors: tuple[MirrorServer, list[int]],
) -> None:
    server, heard = mirrors
    log = Ask(PEER, FetchLog(1, Slot(0), Incarnation(1), 7, PartitionId(9), 0))
    peer = Peer({9: LogFetched(-1)})
    assert server._ask_all(peer, [wish(0), wish(1), log, wish(2)]) == [False] * 4
    assert peer.asked == heard == [0, 1, 9, 2] and peer.most == 2
