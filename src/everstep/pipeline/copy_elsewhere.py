"""Finds the neighbour that keeps a worker's copies, and gets them back from there when the worker's machine is gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec
import numpy as np
import torch

from everstep.allreduce.serialize import SerializedState
from everstep.bounds import MALFORMED
from everstep.brain.events import Answer
from everstep.errors import CheckpointError, EverstepError, WireError
from everstep.ids import NodeId, Slot
from everstep.model.copy_places import CopyPlace
from everstep.native import crc32c
from everstep.net.data import DataClient
from everstep.net.messages import (
    CopyPlaces,
    CopyPlacesAsked,
    CopyRead,
    KeptCopies,
    KeptCopiesAsked,
    KeptPart,
    StatePart,
)
from everstep.net.messages import RequestType as Request
from everstep.pipeline.copy_slots import BLOCK_BYTES, CopyPage
from everstep.pipeline.copy_store import READ_BYTES
from everstep.pipeline.slot_memory import CopyMeta, check_blocks, free_memory
from everstep.policies.copy_frequency import mean_time_to_failure
from everstep.policies.node_selection import choose_neighbour

ASK_S: Final = 5.0
CONNECT_S: Final = 3.0
_LOOK_S: Final = 1.0  # for a first neighbour
_LOOK_AGAIN_S: Final = 5.0

logger = logging.getLogger("everstep.worker")
_meta_decoder: Final = msgspec.msgpack.Decoder(CopyMeta)
Connect = Callable[[CopyPlace], DataClient]


class Asks(Protocol):
    """Is what is needed of ``member_runtime.MemberRuntime``."""

    def call(self, request: Request, timeout_s: float) -> Answer: ...


def copy_places(runtime: Asks) -> CopyPlaces:
    """Return the agents that keep copies, by the master's word. Raises EverstepError: it does not answer."""
    answer = runtime.call(CopyPlacesAsked(), ASK_S)
    return answer if isinstance(answer, CopyPlaces) else CopyPlaces()


class NeighbourWatch:
    """Says on the page who the neighbour is, and how often the job needs copies, in a thread of the first stage; asks
    the master again and again. ``alone``: the job has no other nodes."""

    def __init__(self, runtime: Asks, page: CopyPage, node: NodeId, alone: bool = False) -> None:
        self._runtime, self._page, self._node, self._alone = runtime, page, node, alone
        self._over = threading.Event()
        page.place = None
        self._thread = threading.Thread(target=self._run, name="everstep-neighbour", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<NeighbourWatch of {self._node}: {self._page.place}>"

    def look(self) -> None:
        """Ask the master once. Raises EverstepError."""
        known = copy_places(self._runtime)
        places = known.places
        self._page.mean_time_to_failure_s = mean_time_to_failure(known.failures, known.age_s)
        own = next((p.machine for p in places if p.node == self._node), "")
        found = choose_neighbour(places, self._node, own)
        before = self._page.place
        if found == before:
            return
        self._page.place = found
        if found is not None:
            logger.info("copies of the stages go to node %s, too", found.node)
        elif before is not None:
            logger.warning(
                "node %s is gone, and no other node keeps copies; training goes on with the copies in its own memory",
                before.node,
            )

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except EverstepError as error:
                logger.debug("the master does not say who keeps copies: %s", error)
            if self._over.wait(_LOOK_AGAIN_S if self._alone or self._page.place is not None else _LOOK_S):
                return

    def close(self) -> None:
        self._over.set()


def newest_elsewhere(
    places: Iterable[CopyPlace], connect: Connect, slot: Slot, stages: int, than: tuple[int, int] = (-1, -1)
) -> tuple[CopyMeta, list[SerializedState]] | None:
    """Return the newest copy of all stages that agents keep, and its parts by stage. None: none is newer than life and
    step of ``than``, or can be had."""
    found: list[tuple[tuple[int, int], CopyPlace, list[KeptPart]]] = []
    for place in places:
        try:
            with connect(place) as client:
                answer, _ = client.request(KeptCopiesAsked(slot), timeout_s=ASK_S)
        except (EverstepError, OSError) as error:
            logger.warning("the copies on node %s cannot be reached: %s", place.node, error)
            continue
        if not isinstance(answer, KeptCopies) or answer.stages != stages:
            continue
        by_stage = [{(p.life, p.step): p for p in answer.parts if p.stage == s} for s in range(stages)]
        for key in set.intersection(*map(set, by_stage)):
            if key > than:
                found.append((key, place, [parts[key] for parts in by_stage]))
    for key, place, parts in sorted(found, key=lambda one: one[0], reverse=True):
        try:
            with connect(place) as client:
                read = [_read(client, slot, part, place.node) for part in parts]
            meta = _meta_decoder.decode(read[0][0])
        except (EverstepError, OSError, *MALFORMED) as error:
            logger.warning("the copy of step %d on node %s is not used: %s", key[1], place.node, error)
            continue
        logger.info("has the copy of step %d from node %s", key[1], place.node)
        return meta, [state for _, state in read]
    return None


def _read(client: DataClient, slot: Slot, part: KeptPart, node: NodeId) -> tuple[bytes, SerializedState]:
    """Return what a stage's copy says of itself, and the stage. Raises WireError, CheckpointError."""
    text_bytes = part.meta_bytes + part.header_bytes
    sums_bytes = 4 * -(-part.body_bytes // BLOCK_BYTES)
    what = f"the copy of stage {part.stage} on node {node}"
    needed, free = text_bytes + sums_bytes + part.body_bytes, free_memory()
    if needed > free:
        raise CheckpointError(f"{what} takes {needed / 1e6:.1f} MB, and this machine has {free / 1e6:.1f} MB to spare")
    head, body = bytearray(text_bytes + sums_bytes), torch.empty(part.body_bytes, dtype=torch.uint8)
    _read_range(client, slot, part, 0, memoryview(head))
    _read_range(client, slot, part, len(head), body.numpy().data)
    text, sums = bytes(head[:text_bytes]), np.frombuffer(bytes(head[text_bytes:]), np.uint32)
    if crc32c(text) != part.text_crc:
        raise CheckpointError(f"{what}: its header is damaged")
    check_blocks(body.numpy(), sums, 0, what)
    return text[: part.meta_bytes], SerializedState(text[part.meta_bytes :], body)


def _read_range(client: DataClient, slot: Slot, part: KeptPart, begin: int, into: memoryview) -> None:
    """Fill ``into`` with what a copy has from byte ``begin`` on. Raises WireError."""
    for at in range(0, len(into), READ_BYTES):
        size = min(READ_BYTES, len(into) - at)
        asked = CopyRead(slot, part.stage, part.step, part.life, begin + at, size)
        answer, piece = client.request(asked, into=into[at : at + size], timeout_s=ASK_S)
        if not isinstance(answer, StatePart) or piece.nbytes != size:
            raise WireError(f"it is not there any more: {answer}")


__all__ = ["NeighbourWatch", "copy_places", "newest_elsewhere"]
