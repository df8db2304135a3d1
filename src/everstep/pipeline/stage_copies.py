"""Copies the state of a stage while its process waits for its neighbours.

A copy of step k begins at the boundary before that step. What may change before the optimizer steps (buffers, tracked
objects, gradients that are carried on) and what is small is copied at once; parameters and what optimizers keep of them
change only when the optimizer steps, so native code copies them in the waits of the iteration, and what is left just
before the optimizer steps. If something else has changed them meanwhile, the copy is thrown away."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from everstep.allreduce.state import ReplicaState
from everstep.errors import PlatformError, ScriptError
from everstep.model.stage_spans import CopyTotals, WaitUse
from everstep.pipeline.copy_sender import CopySender
from everstep.pipeline.copy_slots import BLOCK_BYTES, CopyMemory, CopyMeta, CopySlot
from everstep.pipeline.device_copier import Copier, HostCopier, copier_for
from everstep.pipeline.idle_board import IdleEntry
from everstep.pipeline.state_layout import StateLayout
from everstep.policies.copy_frequency import CopyCost, choose_interval, span_limits
from everstep.policies.idle_spans import IdleSpan

_LENGTHS: Final = 20  # of each wait that are kept
_LEAST: Final = 5  # before waits are chosen by them
_COLD: Final = 4  # first copies: their memory is new
_CHOOSE_EVERY: Final = 5  # copies
_NO_LIMIT: Final = 1 << 62
_RATE_BYTES: Final = 4 << 20  # copied in spans, before the speed is known

logger = logging.getLogger("everstep.worker")


class _Captured(NamedTuple):
    """Is a state that is to be copied. ``header``: of the state, as it was then."""

    step: int
    meta: bytes
    header: bytes
    layout: StateLayout


class StageCopies:
    """Is the copies of one stage; for the thread that trains. ``every``: 0: as often as it costs no more than the
    bound; else in one of so many iterations."""

    def __init__(
        self,
        memory: CopyMemory,
        stage: int,
        life: int,
        state: ReplicaState,
        every: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        sender: CopySender | None = None,
        entry: IdleEntry | None = None,
    ) -> None:
        """Take ``sender``: what sends copies to the neighbour; None: nothing does. ``entry``: where the agent of this
        node reads when the stage waits."""
        self._sender, self._entry = sender, entry
        self._usual_s: tuple[float, ...] = ()  # of each wait
        self._sent: CopySlot | None = None  # on its way to the neighbour: not written meanwhile
        self._behind = 0
        self._memory, self._stage, self._life, self._state = memory, stage, life, state
        self._page, self._slots = memory.page, memory.slots[stage]
        self._clock = clock
        self._every = every
        self._copier: Copier = HostCopier()
        self._slot: CopySlot | None = None  # being written
        self._target: tuple[np.ndarray, np.ndarray] | None = None
        self._captured: _Captured | None = None
        self._layout: StateLayout | None = None  # of the newest copy
        self._begin_s = self._began_at = self._opened_at = 0.0
        self._used = WaitUse()  # by all waits before this one
        self._opening = self._ended_late = 0  # number of the wait in this iteration; late blocks before it
        self._lengths: list[deque[float]] = []
        self._limits: tuple[int, ...] = ()
        self._limits_at = 0
        self._costs: deque[CopyCost] = deque(maxlen=16)
        self._generation = 0  # in which all that was measured
        self._done = 0
        self._failed = False
        self.interval, self.reason = max(1, every), "as the job says" if every else "no copy is measured yet"
        self._copies = self._discarded = self._skipped = self._overruns = 0
        self._spent_begin_s = self._spent_stall_s = 0.0
        self._copied = -1  # step that the first stage chose last
        self.step_s = 0.0

    def __repr__(self) -> str:
        return f"<StageCopies stage {self._stage}, one in {self.interval}, {self._copies} copies>"

    # ------------------------------------------------------------ of the first stage: which steps are copied

    def choose(self, step: int) -> None:
        """Say, as the first stage, before anybody begins ``step``, whether its state is copied."""
        page = self._page
        page.send = -1
        if page.unable.any():
            page.step = -1
            return
        interval = max(self.interval, int(page.wished.max()))
        if step in (page.step, page.held) or not 0 <= self._copied <= step or step - self._copied >= interval:
            self._copied = page.step = step
            if page.place is not None:
                late = bool((page.sending >= 0).any())  # some stage's last one is still on its way
                self._behind += late
                page.send = -1 if late else step
        else:
            page.step = -1

    def hold(self, step: int) -> bool:
        """Have ``step``, which ``choose`` comes to next, copied and kept. False: some stage cannot copy."""
        page = self._page
        if page.unable.any():
            return False
        page.held = step
        return True

    def adopt(self, step: int) -> None:
        """Go on, as the first stage, from the copy of ``step``; -1: from anything else, so no copy is of use."""
        if step < 0:
            self._memory.clear()
            if self._sender is not None:
                self._sender.forget()
        else:
            self._page.newest[:] = step
            self._page.step = -1
        self._page.wished[:] = 0
        self._page.unable[:] = 0
        self._page.held = self._copied = -1

    # ------------------------------------------------------------ one copy

    def begin(self, step: int, meta: CopyMeta | None, generation: int = 0) -> None:
        """The state is that before ``step``, which the group of ``generation`` does: begin its copy, if it is to be
        copied."""
        now = self._clock()
        if generation != self._generation:
            self._remeasure()
            self._generation = generation
        self.step_s, self._began_at = now - self._began_at, now
        self._opening = 0
        if self._sender is not None:
            self._sender.next_iteration()
        if self._captured is not None:
            self.finish()  # (an iteration without an optimizer's step)
        if self._failed or self._page.step != step or int(self._page.newest[self._stage]) == step:
            return
        try:
            self._captured = self._capture(step, meta)
        except ScriptError as error:
            self._give_up(error)
            return
        self._begin_s = self._clock() - now
        self._start()

    def _give_up(self, error: Exception) -> None:
        self._failed, self._captured = True, None
        self._page.unable[self._stage] = 1
        logger.warning("%s; this job goes on without copies of its stages, and with its checkpoints", error)

    def _free_slot(self, step: int) -> CopySlot | None:
        """Return the slot that may be written: not the one with the newest step that all stages have. None: others
        have not got as far yet."""
        mine, common = int(self._page.newest[self._stage]), self._page.common
        if mine > common and mine >= step - 1:
            return None
        sent = self._sent if self._sender is not None and self._sender.busy else None
        free = [(slot, slot.head()) for slot in self._slots if slot is not sent]
        free = [(slot, head) for slot, head in free if head is None or head.step != self._page.held]
        for slot, head in free:
            if head is None or head.step != common:
                return slot
        return free[0][0] if free else None

    def _capture(self, step: int, meta: CopyMeta | None) -> _Captured:
        layout = self._layout
        if layout is None or not layout.follows(self._state):
            layout = self._layout = StateLayout(self._state)
            if layout.device.type != "cpu" and isinstance(self._copier, HostCopier):
                self._copier = copier_for(layout.device)
        layout.capture()
        encoded = b"" if meta is None else msgspec.msgpack.encode(meta)
        return _Captured(step, encoded, layout.text, layout)

    def _start(self) -> None:
        """Begin to write what was captured, where a slot is free."""
        found, slot = self._captured, None
        if found is None or (slot := self._free_slot(found.step)) is None:
            return
        self._page.newest[self._stage] = self._page.common  # (a newer one that others do not have is written over)
        try:
            layout = found.layout
            body, sums = slot.begin(found.step, self._life, found.meta, found.header, layout.size_bytes)
        except PlatformError as error:
            if self._page.held >= 0:  # (there is room for two, and one more is held for a checkpoint)
                self._captured = None
                self._skipped += 1
                return
            self._give_up(error)
            return
        self._copier.load(layout, body, sums)
        self._slot, self._target = slot, (body, sums)
        if self._sender is not None and self._page.send == found.step:
            ready = partial(self._blocks_copied, layout.size_bytes)
            begun = self._sender.begin(found.step, found.meta, found.header, body, sums, ready)
            self._sent = slot if begun else None

    def _blocks_copied(self, size_bytes: int) -> int:
        """Return how many blocks are surely copied: the newest ones that are claimed may be in the making."""
        return max(0, -(-(size_bytes - self._copier.left) // BLOCK_BYTES) - self._copier.chunk_blocks)

    def wait_begins(self) -> None:
        """The process is about to wait for a neighbour."""
        self._opened_at = self._clock()
        self._used = self._used_so_far()
        if self._slot is None and self._captured is not None:
            self._start()  # (the others may have got as far now)
        if self._slot is not None:
            limit = self._limits[self._opening] if self._opening < len(self._limits) else _NO_LIMIT
            if limit:
                self._ended_late = self._copier.counts()[3]
                self._copier.open(limit)
        if self._captured is not None:
            self._captured.layout.check(self._state)  # (``finish`` looks at what it says)
        if self._entry is not None:
            usual = self._usual_s
            self._entry.waits(time.monotonic(), usual[self._opening] if self._opening < len(usual) else 0.0)
        if self._sender is not None:
            self._sender.open()

    def _used_so_far(self) -> WaitUse:
        return WaitUse(self._copier.counts()[4], 0.0 if self._sender is None else self._sender.sending_s)

    def wait_ends(self) -> WaitUse:
        """The neighbour has come. Returns what the wait was used for; a block that ends behind it is not counted."""
        if self._entry is not None:
            self._entry.computes()
        if self._sender is not None:
            self._sender.shut()
        if self._slot is not None:
            self._copier.close()
            self._overruns += self._copier.counts()[3] > self._ended_late + 1
        if self._opening == len(self._lengths):
            self._lengths.append(deque(maxlen=_LENGTHS))
        self._lengths[self._opening].append(self._clock() - self._opened_at)
        self._opening += 1
        used = self._used_so_far()
        return WaitUse(used.copied_s - self._used.copied_s, used.sent_s - self._used.sent_s)

    def finish(self) -> None:
        """The optimizer is about to step: the copy has to be whole."""
        if self._slot is None and self._captured is not None:
            self._start()
        slot, found = self._slot, self._captured
        self._slot = self._captured = None
        if found is None:
            return
        if slot is None:
            self._skipped += 1
            return
        begin = self._clock()
        self._copier.finish()
        follows = found.layout.check(self._state)
        changed = not follows or found.layout.changed
        if not follows:
            self._layout = None
        sends = self._sender is not None and slot is self._sent
        if changed:
            self._discarded += 1
            if self._sender is not None and sends:
                self._sender.drop()
        else:
            slot.end()
            self._page.newest[self._stage] = found.step
            self._copies += 1
            if self._sender is not None and sends:
                self._sender.whole()
        self._copier.drop()
        after = self._copier.counts()
        self._target = None
        stall_s = self._clock() - begin
        self._spent_begin_s += self._begin_s
        self._spent_stall_s += stall_s
        self._done += 1
        if self._done > _COLD and self.step_s > 0:
            self._costs.append(CopyCost(self._begin_s, stall_s, self.step_s))
        self._choose_waits(after)
        if not self._every and self._costs and self._done % _CHOOSE_EVERY == 0:
            self.interval, self.reason = choose_interval(
                list(self._costs), self.interval, mean_time_to_failure_s=self._page.mean_time_to_failure_s
            )
            self._page.wished[self._stage] = self.interval

    def _choose_waits(self, counts: Sequence[float]) -> None:
        """Choose, now and then, in which waits to copy."""
        if counts[0] < _RATE_BYTES or counts[4] <= 0 or self._done < self._limits_at:
            return
        if any(len(lengths) < _LEAST for lengths in self._lengths):
            return
        self._limits_at = self._done + _LENGTHS
        self._usual_s = tuple(fmean(lengths) for lengths in self._lengths)
        spans = [IdleSpan(0.0, fmean(lengths), pstdev(lengths)) for lengths in self._lengths]
        self._limits = span_limits(spans, counts[0] / counts[4], BLOCK_BYTES)

    def _remeasure(self) -> None:
        """The group is another one: what was measured does not count."""
        self._lengths, self._limits, self._limits_at = [], (), 0
        self._usual_s = ()
        self._layout = None
        self._costs.clear()

    @property
    def bytes_per_s(self) -> float:
        """Return how fast waits were used for copies; 0: too little was copied yet to say."""
        inside, _, _, _, busy_s = self._copier.counts()
        return inside / busy_s if inside >= _RATE_BYTES and busy_s > 0 else 0.0

    @property
    def totals(self) -> CopyTotals:
        inside, late, stalled, _, _ = self._copier.counts()
        return CopyTotals(
            copies=self._copies,
            discarded=self._discarded,
            skipped=self._skipped,
            inside_bytes=inside,
            late_bytes=late,
            stalled_bytes=stalled,
            overruns=self._overruns,
            begin_s=self._spent_begin_s,
            stall_s=self._spent_stall_s,
            interval=max(self.interval, int(self._page.wished.max())),
            reason=self.reason,
            **self._sent_totals(),
        )

    def _sent_totals(self) -> dict[str, Any]:
        sender = self._sender
        if sender is None:
            return {}
        return {
            "neighbour": sender.neighbour,
            "kept": sender.kept,
            "sent_bytes": sender.sent_bytes,
            "sent_late_bytes": sender.late_bytes,
            "sent_s": sender.sent_s,
            "received_s": sender.received_s,
            "received_late_bytes": min(sender.sent_bytes, sender.received_late_blocks * BLOCK_BYTES),
            "behind": self._behind,
        }

    def close(self, forget: bool = False) -> None:
        """``forget``: the worker has ended well."""
        self._slot = self._captured = None
        if self._sender is not None:
            self._sender.close(forget and self._stage == 0)
        self._copier.drop()
        self._layout = None


__all__ = ["CopyTotals", "StageCopies"]
