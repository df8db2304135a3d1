"""Copies that an agent of another node keeps: whole or not there, of all stages or none, and never in the way."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_stage_copies import STAGES, Stage

from everstep.errors import WireError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.copy_places import CopyPlace
from everstep.model.group import Position
from everstep.model.member import Address
from everstep.model.stage_spans import COPY_SLOTS
from everstep.native import crc32c
from everstep.net.messages import (
    Bad,
    CopiesDropped,
    CopyBegun,
    CopyBlocks,
    CopyEnded,
    CopyTaken,
    DataAnswer,
    KeptCopies,
    KeptCopiesAsked,
)
from everstep.pipeline import copy_elsewhere, slot_memory
from everstep.pipeline.copy_elsewhere import NeighbourWatch, newest_elsewhere
from everstep.pipeline.copy_sender import CopySender
from everstep.pipeline.copy_slots import CopyMemory, CopyMeta
from everstep.pipeline.copy_store import CopyStore
from everstep.pipeline.slot_memory import BLOCK_BYTES
from everstep.policies.node_selection import choose_neighbour

ME = Slot(0), Incarnation(1)
PLACE = CopyPlace(NodeId("b"), "mb", Address(NodeId("b"), "", "127.0.0.1", 1))


class Direct:
    """A connection to a store, without a network. ``broken``: what it raises, from now on."""

    def __init__(self, store: CopyStore, gate: threading.Event | None = None) -> None:
        self.store, self.gate = store, gate
        self.broken, self.closed = "", False
        self.answers: list[tuple[DataAnswer, memoryview]] = []

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Any, buffers: Sequence[Any] = (), *, timeout_s: float = 30.0) -> None:
        if self.broken:
            raise WireError(self.broken)
        if self.gate is not None and isinstance(message, CopyBlocks):
            assert self.gate.wait(60)
            if self.closed:
                raise WireError("the connection is closed")
        body = b"".join(bytes(b) for b in buffers)
        answer, out = self.store.handle(message, memoryview(body), None)
        self.answers.append((answer, memoryview(b"".join(bytes(b) for b in out))))

    def receive(self, *, into: Any = None, timeout_s: float = 30.0) -> tuple[DataAnswer, memoryview]:
        answer, body = self.answers.pop(0)
        if into is not None and len(body):
            into[: len(body)] = body
        return answer, body

    def request(self, message: Any, buffers: Sequence[Any] = (), **more: Any) -> tuple[DataAnswer, memoryview]:
        self.send(message, buffers)
        return self.receive(into=more.get("into"))

    def close(self) -> None:
        self.closed = True
        if self.gate is not None:
            self.gate.set()


@pytest.fixture
def store() -> Iterator[CopyStore]:
    made = CopyStore()
    yield made
    made.close()


class Worker:
    """The stages of one worker, with their senders; all in this process."""

    def __init__(self, store: CopyStore, width: int = 300, life: int = 1, at_once: bool = False) -> None:
        self.fds = [os.memfd_create("test") for _ in range(1 + COPY_SLOTS * STAGES)]
        self.gate = threading.Event()  # closed: blocks are on their way
        self.gate.set()
        self.link = Direct(store, self.gate)
        memory = [CopyMemory(self.fds, STAGES) for _ in range(STAGES)]
        self.page = memory[0].page
        self.page.place = PLACE
        self.life = life
        self.stages = [Stage(memory[n], n, width + n, life) for n in range(STAGES)]
        me = Slot(0), Incarnation(life)
        self.senders = [
            CopySender(memory[n].page, n, me, lambda _: self.connected(), at_once=at_once) for n in range(STAGES)
        ]
        for stage, sender in zip(self.stages, self.senders, strict=True):
            stage.copies._sender = sender
        self.stages[0].copies.adopt(-1)

    def connected(self) -> Direct:
        return Direct(self.link.store, self.gate) if not self.link.broken else self.link

    def step(self, step: int, settle: bool = True) -> None:
        self.stages[0].copies.choose(step)
        for stage in self.stages:
            stage.truth[step] = stage.state._serialized(Position(), 0, None)
            meta = CopyMeta(Position(step, 0, 0, 8 * step), 1, 1, 0, self.life) if stage.number == 0 else None
            stage.copies.begin(step, meta)
            stage.copies.wait_begins()
            time.sleep(0.002)
            stage.copies.wait_ends()
            stage.forward()
            stage.optimize()
        if settle:
            self.settle()

    def settle(self) -> None:
        end = time.monotonic() + 20
        while (self.page.sending >= 0).any():
            for stage in self.stages:
                stage.copies.wait_begins()
                time.sleep(0.005)
                stage.copies.wait_ends()
            assert time.monotonic() < end

    def close(self) -> None:
        for stage in self.stages:
            stage.copies.close(forget=False)
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def worker(store: CopyStore) -> Iterator[Worker]:
    made = Worker(store)
    yield made
    made.close()


def newest(store: CopyStore, than: tuple[int, int] = (-1, -1)) -> Any:
    return newest_elsewhere([PLACE], lambda _: Direct(store), ME[0], STAGES, than)  # type: ignore[arg-type,return-value]


def test_what_comes_back_is_what_each_stage_had_bit_for_bit(worker: Worker, store: CopyStore) -> None:
    for step in range(12):
        worker.step(step)
        meta, parts = newest(store)
        assert meta.position.step == step and worker.page.common_kept == step
        for stage, part in zip(worker.stages, parts, strict=True):
            assert part.header == stage.truth[step].header
            assert torch.equal(part.body, stage.truth[step].body)
    totals = worker.stages[1].copies.totals
    assert totals.kept == 12 and totals.neighbour == "b" and totals.sent_bytes > 12 * BLOCK_BYTES
    assert totals.sent_s > 0 and totals.received_s > 0
    assert newest(store, (1, 11)) is None


def test_a_copy_that_is_late_is_not_written_over_and_own_copies_go_on(worker: Worker, store: CopyStore) -> None:
    worker.step(0)
    worker.gate.clear()
    for step in range(1, 6):
        worker.step(step, settle=False)
        assert worker.page.common == step  # in the own memory
    assert worker.page.common_kept == 0 and newest(store)[0].position.step == 0
    assert worker.stages[0].copies.totals.behind == 4
    worker.gate.set()
    worker.settle()
    meta, parts = newest(store)
    assert meta.position.step == 1
    for stage, part in zip(worker.stages, parts, strict=True):
        assert torch.equal(part.body, stage.truth[1].body)


def test_if_the_job_says_how_often_no_wait_is_waited_for(store: CopyStore) -> None:
    worker = Worker(store, at_once=True)
    try:
        for step in range(4):
            worker.step(step, settle=False)
            end = time.monotonic() + 20
            while (worker.page.sending >= 0).any():
                assert time.monotonic() < end
                time.sleep(0.001)
            assert newest(store)[0].position.step == step
    finally:
        worker.close()


def test_a_neighbour_without_room_is_one_line_and_training_goes_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(3):
        worker.step(step)
    for stage in worker.stages:  # (the own memory is there already)
        for slot in stage.copies._slots:
            slot._mapped(4 * BLOCK_BYTES * 4)
    worker.link.store.close()  # (what was there is gone, so memory is asked for anew)
    monkeypatch.setattr(slot_memory, "free_memory", lambda: 1000)
    with caplog.at_level(logging.WARNING):
        for step in range(3, 7):
            worker.step(step)
    for n in range(STAGES):
        lines = [m for m in caplog.messages if f"stage {n}: node b does not keep copies: no memory for a copy" in m]
        assert len(lines) == 1 and "goes on with the copies in its own memory" in lines[0]
    assert worker.page.common == 6 and worker.page.common_kept == -1


def test_a_neighbour_that_is_away_is_one_line_and_comes_back(
    store: CopyStore, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(store)
    worker.link.broken = "connection refused"
    try:
        with caplog.at_level(logging.INFO):
            for step in range(4):
                worker.step(step)
            assert worker.page.common == 3 and worker.page.common_kept == -1
            worker.link.broken = ""
            for sender in worker.senders:
                sender._refused_at = -1e9  # (the time until the next attempt is over)
            worker.step(4)
        assert sum("does not keep copies: connection refused" in m for m in caplog.messages) == STAGES
        assert sum("keeps copies again" in m for m in caplog.messages) == STAGES
        assert newest(store)[0].position.step == 4
    finally:
        worker.close()


def test_a_state_that_was_changed_meanwhile_is_not_kept(worker: Worker, store: CopyStore) -> None:
    worker.step(0)
    worker.stages[0].copies.choose(1)
    for stage in worker.stages:
        meta = CopyMeta(Position(1, 0, 0, 8), 1, 1, 0, 1) if stage.number == 0 else None
        stage.copies.begin(1, meta)
        stage.forward()
        with torch.no_grad():
            stage.model.weight += 1
        stage.optimize()
    worker.settle()
    assert newest(store)[0].position.step == 0
    worker.step(2)
    assert newest(store)[0].position.step == 2


def test_a_neighbour_that_does_not_answer_holds_nobody_up(worker: Worker, store: CopyStore) -> None:
    worker.step(0)
    worker.gate.clear()
    worker.stages[0].copies.choose(1)
    stage = worker.stages[1]
    stage.copies.begin(1, None)
    stage.copies.wait_begins()
    end = time.monotonic() + 20
    while not worker.senders[1].busy:
        assert time.monotonic() < end
    time.sleep(0.05)
    with torch.no_grad():
        stage.model.weight += 1
    stage.forward()
    stage.optimize()  # the copy is thrown away, so its bytes must not be looked at any more
    assert not worker.senders[1].busy
    assert newest(store)[0].position.step == 0


def test_a_later_life_reads_what_the_former_one_sent_and_fences_it(worker: Worker, store: CopyStore) -> None:
    for step in range(3):
        worker.step(step)
    later = Worker(store, life=2)
    try:
        assert newest(store)[0].position.step == 2
        later.step(1)  # it went on from an older checkpoint: what its life wrote counts
        assert newest(store)[0].incarnation == 2 and newest(store)[0].position.step == 1
        assert handled(store, CopyBegun(*ME, 0, STAGES, 9, 0, 2, 1), b"ab") == "worker:0 #1 was replaced by #2"
        store.handle(CopiesDropped(*ME), memoryview(b""), None)
        assert newest(store) is not None
        later.senders[0].forget()
        assert newest(store) is None
    finally:
        later.close()


def handled(store: CopyStore, request: Any, body: bytes = b"") -> str:
    answer, _ = store.handle(request, memoryview(body), None)
    return answer.error if isinstance(answer, Bad) else ""


def test_what_does_not_fit_together_is_refused_and_nothing_whole_is_lost(worker: Worker, store: CopyStore) -> None:
    worker.step(0)
    body = np.arange(BLOCK_BYTES + 10, dtype=np.uint8)
    sums = b"".join(crc32c(b.tobytes()).to_bytes(4, "little") for b in (body[:BLOCK_BYTES], body[BLOCK_BYTES:]))
    assert "no copy of worker:7 #1, stage 0, was begun" in handled(store, CopyEnded(Slot(7), ME[1], 0, 3))
    assert "there is no such stage" in handled(store, CopyBegun(*ME, 2, 2, 3, 0, 2, 10), b"ab")
    assert "too large, or torn" in handled(store, CopyBegun(*ME, 0, 2, 3, 0, 3, 10), b"ab")
    assert "too large, or torn" in handled(store, CopyBegun(*ME, 0, 2, 3, 0, 2, 1 << 50), b"ab")
    assert handled(store, CopyBegun(*ME, 0, 2, 3, 0, 2, len(body)), b"ab") == ""
    assert "do not follow" in handled(store, CopyBlocks(*ME, 0, 4, 0, 1), sums[:4] + body[:BLOCK_BYTES].tobytes())
    assert "do not follow" in handled(store, CopyBlocks(*ME, 0, 3, 1, 1), sums[4:] + body[BLOCK_BYTES:].tobytes())
    assert "bytes came for 3 blocks" in handled(store, CopyBlocks(*ME, 0, 3, 0, 3), sums + body.tobytes())
    wrong = bytes(4) + body[:BLOCK_BYTES].tobytes()
    assert "block 0 is damaged" in handled(store, CopyBlocks(*ME, 0, 3, 0, 1), wrong)
    assert "is not all here" in handled(store, CopyEnded(*ME, 0, 3))
    assert handled(store, CopyBlocks(*ME, 0, 3, 0, 2), sums + body.tobytes()) == ""
    assert handled(store, CopyEnded(*ME, 0, 3)) == ""
    assert newest(store)[0].position.step == 0  # stage 1 has no copy of step 3
    answer, _ = store.handle(CopyTaken(), memoryview(b""), None)  # type: ignore[arg-type]
    assert isinstance(answer, Bad)


def test_a_damaged_copy_at_the_neighbour_is_named_and_the_older_one_is_taken(
    worker: Worker, store: CopyStore, caplog: pytest.LogCaptureFixture
) -> None:
    worker.step(0)
    worker.step(1)
    slot, head = store._workers[ME[0]].stages[1].heads()[1, 1]
    slot._mapped(0)[head.body_at + 5] ^= 1
    assert newest(store)[0].position.step == 0
    assert "the copy of stage 1 on node b: block 0 is damaged" in caplog.text
    kept, _ = store.handle(KeptCopiesAsked(Slot(3)), memoryview(b""), None)
    assert kept == KeptCopies()


def test_a_copy_of_another_number_of_stages_or_without_room_here_is_not_used(
    worker: Worker, store: CopyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.step(0)
    link: Any = lambda _: Direct(store)  # noqa: E731
    assert newest_elsewhere([PLACE], link, ME[0], STAGES + 1) is None
    assert newest_elsewhere([PLACE], link, Slot(5), STAGES) is None
    monkeypatch.setattr(copy_elsewhere, "free_memory", lambda: 1000)
    assert newest(store) is None
    assert "the copy of stage 0 on node b takes 0.4 MB, and this machine has 0.0 MB to spare" in caplog.text


def test_an_agent_that_cannot_be_reached_is_named_and_the_next_one_asked(
    worker: Worker, store: CopyStore, caplog: pytest.LogCaptureFixture
) -> None:
    worker.step(0)
    away = CopyPlace(NodeId("away"), "", PLACE.address)

    def connect(place: CopyPlace) -> Any:
        if place == away:
            raise WireError("no route")
        return Direct(store)

    found = newest_elsewhere([away, PLACE], connect, ME[0], STAGES)
    assert found is not None and found[0].position.step == 0
    assert "the copies on node away cannot be reached: no route" in caplog.text


def test_the_neighbour_is_the_next_node_on_another_machine() -> None:
    def place(node: str, machine: str = "") -> CopyPlace:
        return CopyPlace(NodeId(node), machine, PLACE.address)

    b, b2, c, home = place("b", "m1"), place("b2", "m1"), place("c", "m2"), place("node0")
    assert choose_neighbour([home, c, b2, b], NodeId("b"), "m1") == c
    assert choose_neighbour([home, c, b2, b], NodeId("c"), "m2") == home
    assert choose_neighbour([home, c, b2, b], NodeId("node0"), "") == b
    assert choose_neighbour([b, b2], NodeId("b"), "m1") == b2  # better than nothing
    assert choose_neighbour([b], NodeId("b"), "m1") is None


def test_who_keeps_copies_is_asked_again_and_a_lost_neighbour_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from everstep.net.messages import CopyPlaces

    fd = os.memfd_create("test")
    memory = CopyMemory([fd, *(os.memfd_create("test") for _ in range(COPY_SLOTS * STAGES))], STAGES)

    class Master:
        places: tuple[CopyPlace, ...] = (PLACE,)

        failures = 1

        def call(self, request: Any, timeout_s: float) -> CopyPlaces:
            return CopyPlaces(self.places, self.failures, 600.0)

    master = Master()
    with caplog.at_level(logging.INFO):
        watch = NeighbourWatch(master, memory.page, NodeId("node0"))
        watch.close()
        watch._thread.join(10)
        assert memory.page.place == PLACE
        assert memory.page.mean_time_to_failure_s == math.inf
        master.places, master.failures = (), 3
        watch.look()
        watch.look()
    assert memory.page.place is None
    assert memory.page.mean_time_to_failure_s == 200.0
    assert caplog.text.count("copies of the stages go to node b, too") == 1
    assert caplog.text.count("node b is gone, and no other node keeps copies") == 1
