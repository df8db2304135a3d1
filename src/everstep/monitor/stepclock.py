"""Measures where the training thread's time goes: seconds by phase of a step, and own compute per sample.

At every moment the thread is in exactly one phase; ``switch`` goes over to another one and costs one look at the clock
(about a third of a microsecond; ``benchmarks/readings.py`` measures it). So the phases tile the time of the loop, and
what the thread waits for others (``pull``, ``barrier``) is told apart from what it does itself (``COMPUTE``).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Final

from everstep.monitor.slowdown import Slowdown

OUTSIDE: Final = 0  # not in the loop
DATA: Final = 1  # waiting for the next batch
PULL: Final = 2  # waiting for rows
FORWARD: Final = 3  # from the batch to the first gradient
BACKWARD: Final = 4
UPDATE: Final = 5  # what the script does after backward: clipping, the optimizer's step
PUSH: Final = 6  # handing gradients over to the ps
BARRIER: Final = 7  # waiting for the others: collectives, the vote
PHASES: Final = ("outside", "data", "pull", "forward", "backward", "update", "push", "barrier")
PREFIX: Final = "phase."  # of readings
_OWN: Final = (FORWARD, BACKWARD, UPDATE)
_WAITS: Final = (PULL, PUSH, BARRIER)

_RECENT = 256  # steps between two beats that the median is taken of

NEWS = 1.3
"""Who computes so many times slower or faster than it told last has news."""

LONG_S = 0.1
"""Own compute of a step that is worth a beat of its own; of shorter ones the next beat knows more, and soon enough."""


class StepClock:
    """Measures phases: one thread switches; others read. Counters only grow, as long as the process lives."""

    __slots__ = (
        "_at",
        "_compute_ns",
        "_new",
        "_now",
        "_ns",
        "_phase",
        "_recent",
        "_reported_s",
        "_under_way",
        "aside",
        "batch",
        "samples",
        "slowdown",
        "steps",
        "touched",
    )  # fmt: skip

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._ns = [0] * len(PHASES)
        self._phase = OUTSIDE
        self._at = now()
        self._compute_ns = 0  # own compute up to the end of the last one
        self._recent: list[float] = []  # seconds per sample, of the steps since the last beat
        self._reported_s = 0.0  # seconds per sample of the last readings that had them
        self._new = False  # a pace that is not told yet is another one
        self._under_way = 0  # samples that are being computed
        self.samples = self.steps = self.batch = 0
        self.aside = 0  # evaluations that the thread is in
        self.touched = self._at  # when the script last called the job
        self.slowdown = Slowdown()

    def __repr__(self) -> str:
        return f"<StepClock {PHASES[self._phase]} after {self.samples} samples>"

    def switch(self, phase: int) -> int:
        """Go over to ``phase``; returns the one before."""
        now = self._now()
        before, then = self._phase, self._at
        self._at, self._phase = now, phase  # first: who reads meanwhile (``at_least_s``) misses time, counts none twice
        self._ns[before] += now - then
        return before

    def touch(self) -> None:
        """The script calls the job: it does not stand still."""
        self.touched = self._now()

    @property
    def idle_s(self) -> float:
        """Return the time since the thread last did anything that we see; 0.0 where it waits for others. For any
        thread."""
        if self._phase in _WAITS:
            return 0.0
        return max(0, self._now() - max(self._at, self.touched)) * 1e-9

    @property
    def inside(self) -> bool:
        """Return whether it is in the loop, and no more in the first step, which may have much to prepare."""
        return self._phase != OUTSIDE and self.steps > 0 and not self.aside

    @property
    def phase(self) -> int:
        return self._phase

    def begin(self, samples: int) -> None:
        """The thread begins to compute so many more, in one pass or several."""
        self._under_way = samples
        self.switch(FORWARD)

    def first_gradient(self) -> None:
        """Backward has reached a parameter; called for every one."""
        if self._phase == FORWARD:
            self.switch(BACKWARD)

    def computed(self, samples: int) -> None:
        """The thread has done its own compute of ``samples`` more; what a slowdown adds to it is waited here."""
        own_ns = self._own()
        if self.slowdown.on:
            self.slowdown.pause(own_ns * 1e-9)
            own_ns = self._own()
        self._compute_ns += own_ns
        self.steps += 1
        self._under_way = 0
        if samples > 0:
            self.samples += samples
            self.batch = samples
            per_sample_s = own_ns * 1e-9 / samples
            if own_ns * 1e-9 >= LONG_S and not self._reported_s / NEWS < per_sample_s < self._reported_s * NEWS:
                self._new = True
            recent = self._recent
            if len(recent) < _RECENT:
                recent.append(per_sample_s)
            else:
                recent[self.steps % _RECENT] = per_sample_s

    def _own(self) -> int:
        """Own compute since the last ``computed``, in nanoseconds."""
        self.switch(self._phase)
        ns = self._ns
        return ns[FORWARD] + ns[BACKWARD] + ns[UPDATE] - self._compute_ns

    @property
    def at_least_s(self) -> float:
        """Own compute so far per sample of the step under way: at the end it is more. 0.0: none is."""
        samples, phase, ns = self._under_way, self._phase, self._ns
        if not samples or phase not in _OWN:
            return 0.0
        so_far = ns[FORWARD] + ns[BACKWARD] + ns[UPDATE] - self._compute_ns + self._now() - self._at
        return max(0, so_far) * 1e-9 / samples

    @property
    def news(self) -> bool:
        """The next readings are worth telling at once. For any thread."""
        least_s = self.at_least_s
        return self._new or (least_s * self._under_way >= LONG_S and least_s >= NEWS * self._reported_s > 0.0)

    def readings(self) -> dict[str, float]:
        """Return, for the beat, counters in seconds and samples, and the median since the last call where there is
        one."""
        out = {PREFIX + name: ns * 1e-9 for name, ns in zip(PHASES, self._ns, strict=True) if ns}
        recent, self._recent, self._new = self._recent, [], False
        out.update(computed=float(self.samples), compute_s=self._compute_ns * 1e-9, steps=float(self.steps))
        out["batch"] = float(self.batch)
        if (least_s := self.at_least_s) > 0:
            out["at_least_s"] = least_s
        if recent:
            self._reported_s = out["per_sample_s"] = statistics.median(recent)
        return {k: v for k, v in out.items() if math.isfinite(v)}
