"""Says what came of a virtual job: when it ended, what it trained, what its machines could have trained, and when."""

from __future__ import annotations

from typing import Final

import msgspec

from everstep.monitor.node_costs import MachineSpan
from everstep.sim.elastic.job_model import JobModel

BIN_S: Final = 60.0
BINS_MAX: Final = 200
JITTER: Final = 0.2
"""Share by which times of processes differ."""


def uneven(chance: float) -> float:
    """Return the factor by which one process takes longer than the model says; ``chance``: from 0 to 1."""
    return 1 - JITTER + 2 * JITTER * chance


class Bin(msgspec.Struct):
    """Is a span of time. ``machines``: places for workers, on average. ``could``, ``trains``: samples per second that
    they could have trained, and that workers did work on."""

    begin_s: float
    places: float = 0.0
    could: float = 0.0
    trains: float = 0.0


class WorkMeter:
    """Adds up what there was to train with, and what trained."""

    def __init__(self, model: JobModel) -> None:
        self._model = model
        self._places = 0
        self._trains = 0.0
        self._since = 0.0
        self._bins: list[Bin] = []
        self._width_s = BIN_S
        self.could = 0.0

    def __repr__(self) -> str:
        return f"<meter: {self._places} places>"

    def places(self, now: float, more: int) -> None:
        """There are so many more places for workers."""
        self._until(now)
        self._places += more

    def trains(self, now: float, rate: float) -> None:
        """From now on so many samples are trained in a second."""
        self._until(now)
        self._trains = rate

    def close(self, now: float) -> None:
        """The job is over."""
        self._until(now)

    def _until(self, now: float) -> None:
        could = self._model.rate(self._places)
        self.could += could * max(0.0, now - self._since)
        while self._since < now:
            i = int(self._since / self._width_s)
            if i >= 8 * BINS_MAX:
                self._halve()
                continue
            while len(self._bins) <= i:
                self._bins.append(Bin(len(self._bins) * self._width_s))
            end = min(now, (i + 1) * self._width_s)
            share = (end - self._since) / self._width_s
            found = self._bins[i]
            found.places += share * self._places
            found.could += share * could
            found.trains += share * self._trains
            self._since = end

    def _halve(self) -> None:
        pairs = [self._bins[i : i + 2] for i in range(0, len(self._bins), 2)]
        self._width_s *= 2
        self._bins = [
            Bin(
                n * self._width_s,
                sum(b.places for b in pair) / 2,
                sum(b.could for b in pair) / 2,
                sum(b.trains for b in pair) / 2,
            )
            for n, pair in enumerate(pairs)
        ]

    def bins(self) -> tuple[Bin, ...]:
        """Return up to ``BINS_MAX`` spans, in order."""
        while len(self._bins) > BINS_MAX:
            self._halve()
        return tuple(self._bins)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Is what came of one job.

    ``ended``: all data is trained; else ``why`` says what was in the way. ``could``: samples that the machines,
    while the job had them, could have trained. ``reclaims``: machines that were taken back; ``losses``: workers that
    went with them. ``events``: that the brain handled; ``cpu_s``: of this machine, for all of it."""

    ended: bool
    why: str = ""
    length_s: float
    samples: int
    wanted: int
    could: float
    reclaims: int
    losses: int
    machines: tuple[MachineSpan, ...]
    bins: tuple[Bin, ...] = ()
    notes: tuple[tuple[float, str], ...] = ()
    events: int = 0
    cpu_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Return useful samples over those that the machines could have trained."""
        return self.samples / self.could if self.could > 0 else 0.0

    @property
    def node_hours(self) -> float:
        return sum(m.end - m.begin for m in self.machines) / 3600.0
