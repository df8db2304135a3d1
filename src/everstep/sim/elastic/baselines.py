"""Plays what others do about the same machines that come and go: simple rules, each with its best settings.

All train as fast as everstep would on the same machines, whose starts differ as much, write checkpoints as cheaply, and
hear of a loss as early.

- *restart*: a loss ends every process; the job begins again from its newest checkpoint, with the machines that are
  there. Newcomers enter with the next restart, or at a checkpoint, whatever is better.
- *Varuna-like*: it also changes its shape as soon as machines come: a checkpoint, then a restart.
- *Bamboo-like*: each machine can do the work of the one behind it, so single losses cost a short pause, and newcomers
  copy what they need meanwhile; machines that are neighbours and go together make it begin again from its checkpoint.
  The pause is ``BAMBOO_MEET_S``. The rest of what its own simulator counts is left out: steps that take 1.5 times as
  long from a loss to that pause, another pause for newcomers, and the redundant work, for which its publication gives
  no number by itself. So what comes out is more than it would have.
- *Bamboo, free*: the same with our own pause. No system does that; it is what one would have whose redundancy costs
  nothing at all.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from everstep.monitor.node_costs import MachineSpan
from everstep.policies.advise import young_interval
from everstep.sim.elastic.job_model import JobModel
from everstep.sim.elastic.outcome import Outcome, WorkMeter, uneven

SWEEP_S: Final = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0, 5120.0, 10240.0)

BAMBOO_MEET_S: Final = 5.0
"""All machines of Bamboo meet anew after a loss, while nobody trains: 5 s for AlexNet and VGG, 10 s for ResNet and
GNMT, 20 s for BERT and GPT-2 (``local_rendezvous_timeout_delta`` of its simulator, and ``simulate_should_reconfigure``:
after the step, where twice the lost are more than 5 % of the machines; github.com/uclasystem/bamboo, NSDI '23)."""

_CARRIED: Final = 0.05  # twice the lost may be so many of the machines until all meet anew


class Rule(NamedTuple):
    """Says what is done about losses and newcomers.

    ``interval_s``: between checkpoints. ``restart_s``: from a loss that is known until all train again, reading the
    checkpoint not counted. ``joins``: newcomers enter "at restart", "at checkpoint" or "at once". ``redundant``: a
    neighbour has a lost machine's work; ``meet_s``: for how long at least all meet anew then (``BAMBOO_MEET_S``)."""

    name: str
    interval_s: float
    restart_s: float
    joins: str = "at restart"
    redundant: bool = False
    meet_s: float = 0.0


class _MachineChange(NamedTuple):
    at: float
    comes: bool
    machine: int


def run_rule(
    rule: Rule,
    machines: Sequence[MachineSpan],
    home: MachineSpan,
    model: JobModel,
    samples: int,
    limit_s: float,
) -> Outcome:
    """Train ``samples`` on these machines by a rule. ``machines``: all that the source gives until ``limit_s``, ``end``
    -1: never taken back; ``home``: the one that stays."""
    return _Ruled(rule, machines, home, model, samples, limit_s).run()


class _Ruled:
    """Plays one job under a rule. ``kept``: samples that the newest durable checkpoint has."""

    def __init__(
        self,
        rule: Rule,
        machines: Sequence[MachineSpan],
        home: MachineSpan,
        model: JobModel,
        samples: int,
        limit_s: float,
    ) -> None:
        self._rule, self._machines, self._home, self._model = rule, machines, home, model
        self._samples, self._limit_s = samples, limit_s
        starts_s = model.agent_s + model.fork_s + (model.copy_s if rule.redundant else 0.0)
        comes = [m.begin + starts_s * uneven(random.Random(n).random()) for n, m in enumerate(machines)]
        if rule.redundant:
            step_s = model.batch_samples / model.rate(1)
            comes = [math.ceil(at / step_s) * step_s for at in comes]  # (members enter between two steps)
        changes = [_MachineChange(at, True, n) for n, at in enumerate(comes)]
        changes += [_MachineChange(m.end, False, n) for n, m in enumerate(machines) if m.end >= 0]
        self._changes = sorted(c for c in changes if c.at < limit_s)
        self._next = 0
        self._here: set[int] = set()
        self._members: set[int] = set()
        self._now = 0.0
        self._done = self._kept = 0.0
        self._writing: list[tuple[float, float]] = []  # (durable at, samples)
        self._checkpoint_at = math.inf
        self._losses = 0
        self._carried = 0  # losses whose work neighbours do, since all have met
        self._meter = WorkMeter(model)
        self._noted = 0.0

    def _rate(self) -> float:
        places = self._home.places + sum(self._machines[n].places for n in self._members)
        return self._model.rate(places)

    def run(self) -> Outcome:
        self._restart(first=True)
        while self._now < self._limit_s and self._done < self._samples:
            rate = self._rate()
            ends = self._now + (self._samples - self._done) / rate if rate > 0 else math.inf
            change = self._changes[self._next].at if self._next < len(self._changes) else math.inf
            until = min(ends, change, self._checkpoint_at, self._limit_s)
            self._train(until, rate)
            if until == ends:
                self._done = float(self._samples)  # (whatever rounding has left)
                break
            if until == change:
                self._changed()
            elif until == self._checkpoint_at:
                self._checkpoint()
        return self._outcome()

    def _train(self, until: float, rate: float) -> None:
        self._note(rate)
        if until > self._now:
            self._done = min(self._samples, self._done + rate * (until - self._now))
            self._now = until
        while self._writing and self._writing[0][0] <= self._now:
            self._kept = max(self._kept, self._writing.pop(0)[1])

    def _changed(self) -> None:
        """Do what the rule says: machines come and go at this moment."""
        lost = self._pass(self._now)
        if lost:
            self._losses += len(lost)
            self._stand(self._model.detect_s)
            if self._rule.redundant and not self._neighbours(lost):
                self._members -= set(lost)
                self._stand(self._meeting_s(len(lost)))
            else:
                self._fall_back()
        elif self._rule.redundant and self._here - self._members:
            self._members = set(self._here)
            self._stand(self._model.switch_s)
        elif self._rule.joins == "at once" and self._here - self._members:
            self._checkpoint(wait=True)
            self._restart()

    def _meeting_s(self, lost: int) -> float:
        """Return how long all stand after single losses."""
        self._carried += lost
        if 2 * self._carried <= _CARRIED * len(self._members):
            return self._model.meet_s
        self._carried = 0
        return max(self._rule.meet_s, self._model.meet_s)

    def _pass(self, until: float) -> list[int]:
        """Take in all changes up to a time; return members that are gone."""
        lost = []
        while self._next < len(self._changes) and self._changes[self._next].at <= until:
            change = self._changes[self._next]
            self._next += 1
            if change.comes:
                end = self._machines[change.machine].end
                if end < 0 or end > change.at:
                    self._here.add(change.machine)
            else:
                self._here.discard(change.machine)
                if change.machine in self._members:
                    lost.append(change.machine)
        return lost

    def _neighbours(self, lost: list[int]) -> bool:
        """Return whether two that go together stand side by side, in the order in which they came."""
        ring = sorted(self._members)
        at = sorted(ring.index(n) for n in lost)
        near = any(b - a == 1 for a, b in itertools.pairwise(at))
        return near or (len(at) > 1 and len(ring) > 2 and at[0] == 0 and at[-1] == len(ring) - 1)

    def _fall_back(self) -> None:
        self._done = self._kept
        self._writing.clear()
        self._restart()

    def _restart(self, first: bool = False) -> None:
        """Begin all processes, again where one of the machines goes meanwhile."""
        while self._now < self._limit_s:
            lost = self._pass(self._now)
            self._members = set(self._here)
            took_s = self._model.fork_s if first else self._rule.restart_s + self._model.restore_s
            end = self._now + took_s
            gone = next(
                (c.at for c in self._changes[self._next :] if not c.comes and c.machine in self._members), math.inf
            )
            self._losses += len(lost)
            if gone >= end:
                self._stand(took_s)
                break
            self._stand(gone - self._now)
        self._checkpoint_at = self._now + self._rule.interval_s

    def _note(self, rate: float) -> None:
        if rate != self._noted:
            self._noted = rate
            self._meter.trains(self._now, rate)

    def _stand(self, seconds: float) -> None:
        if seconds > 1.0:  # (else it would not be seen)
            self._note(0.0)
        self._now = min(self._limit_s, self._now + seconds)

    def _checkpoint(self, wait: bool = False) -> None:
        write_s = self._model.write_s(full=True)
        had = self._done
        self._stand(write_s if wait else write_s * self._model.stall)
        if wait:
            self._kept = had
        else:
            self._writing.append((self._now + write_s, had))
        self._checkpoint_at = self._now + max(self._rule.interval_s, write_s)
        if self._rule.joins == "at checkpoint" and self._here - self._members:
            self._kept = had
            self._restart()

    def _outcome(self) -> Outcome:
        ended = self._done >= self._samples
        length_s = self._now if ended else self._limit_s
        spans = [self._home._replace(end=length_s)]
        reclaims = 0
        events = [(0.0, self._home.places)]
        for machine in self._machines:
            if machine.begin >= length_s:
                continue
            end = length_s if machine.end < 0 else min(machine.end, length_s)
            reclaims += 0 <= machine.end < length_s
            spans.append(machine._replace(end=end))
            events += [(machine.begin, machine.places), (end, -machine.places)]
        meter = WorkMeter(self._model)
        for at, more in sorted(events):
            meter.places(at, more)
        meter.close(length_s)
        self._meter.close(length_s)
        bins = meter.bins()
        for found, trained in zip(bins, self._meter.bins(), strict=False):
            found.trains = trained.trains
        return Outcome(
            ended=ended,
            why="" if ended else f"not over after {self._limit_s / 3600:.1f} h",
            length_s=length_s,
            samples=int(self._done),
            wanted=self._samples,
            could=meter.could,
            reclaims=reclaims,
            losses=self._losses,
            machines=tuple(spans),
            bins=bins,
        )


def best(run: Callable[[float], Outcome], intervals: Sequence[float] = SWEEP_S) -> tuple[float, Outcome]:
    """Return the interval between checkpoints with the best goodput, and what came of it."""
    found = [(interval_s, run(interval_s)) for interval_s in intervals]
    return max(found, key=lambda pair: (pair[1].ended, pair[1].samples / pair[1].length_s, pair[1].goodput))


def young(model: JobModel, reclaims: int, length_s: float) -> float:
    """Return the interval that Young's rule gives for what a checkpoint costs and how often the job loses machines."""
    cost_s = max(1e-3, model.write_s(full=True) * model.stall)
    return max(model.write_s(full=True), young_interval(cost_s, length_s / max(1, reclaims)))
