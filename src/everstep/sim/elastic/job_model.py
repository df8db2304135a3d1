"""Says what a job takes, in seconds, bytes and samples: the model by which a virtual job answers its master.

``JobModel`` is the port. ``MeasuredJob`` has it from numbers, each of which says where it comes from: assumed here,
told by a flag, or measured in a recorded run (``recorded_job``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from everstep.errors import ConfigError, UserError
from everstep.units import seconds, size_bytes


class JobModel(Protocol):
    """Says how long everything takes that the production master orders, and how fast workers train."""

    def rate(self, workers: int) -> float:
        """Return the samples per second that so many workers train together while nothing disturbs them."""
        ...

    @property
    def batch_samples(self) -> int:
        """Return the samples that one worker trains in one step."""
        ...

    @property
    def agent_s(self) -> float:
        """Return the seconds from a machine that is granted to the hello of its agent."""
        ...

    @property
    def fork_s(self) -> float:
        """Return the seconds from the order to start a worker to its first request for work."""
        ...

    @property
    def forks(self) -> Sequence[tuple[int, float]]:
        """Return the same where so many start at a time, which is longer if they share cores. Empty: not known."""
        ...

    def start_s(self, together: int) -> float:
        """Return the seconds that a worker needs to start if so many start at this time."""
        ...

    @property
    def meet_s(self) -> float:
        """Return the seconds from a loss that is known to the first step of the survivors (mode allreduce)."""
        ...

    @property
    def switch_s(self) -> float:
        """Return the seconds for which a group stands still when members enter or leave as planned."""
        ...

    @property
    def copy_s(self) -> float:
        """Return the seconds for which a newcomer copies the state of a training member (mode allreduce)."""
        ...

    @property
    def detect_s(self) -> float:
        """Return the seconds from the end of a machine without a word until the master knows of it."""
        ...

    @property
    def restore_s(self) -> float:
        """Return the seconds for which the whole state is read from a checkpoint."""
        ...

    @property
    def rebuilding(self) -> float:
        """Return the share of the speed that is left while a ps rebuilds lost partitions."""
        ...

    def build_s(self, share: float) -> float:
        """Return the seconds for which a ps gets ``share`` of all rows over the network."""
        ...

    def write_s(self, full: bool) -> float:
        """Return the seconds that a checkpoint takes; ``full``: of everything, not only of what changed."""
        ...

    @property
    def stall(self) -> float:
        """Return the share of a checkpoint's time that training loses."""
        ...

    @property
    def protecting(self) -> float:
        """Return the share of the speed that one parity partition of each stripe costs."""
        ...


class Figure(NamedTuple):
    """Is a number and where it comes from."""

    value: float
    source: str


ASSUMED: Final = "assumed"

_DEFAULTS: Final[dict[str, tuple[float, str]]] = {
    "samples_per_s": (1000.0, "samples a second of one worker"),
    "batch_s": (0.5, "seconds of one step"),
    "agent_s": (3.0, "from a machine that is granted to the hello of its agent"),
    "fork_s": (0.5, "from the order to start a worker to its first request for work"),
    "meet_s": (0.2, "mode allreduce: from a loss that is known to the next step"),
    "switch_s": (0.05, "mode allreduce: standing still when members enter or leave as planned"),
    "detect_s": (0.0, "until a machine that is gone is known to be; 0: its source says so"),
    "state_bytes": (1e9, "parameters and optimizer state"),
    "copy_bytes_per_s": (1e9, "mode allreduce: state to a newcomer"),
    "rebuild_bytes_per_s": (3e8, "lost partitions out of parity, to one ps"),
    "rebuilding": (0.5, "share of the speed that is left meanwhile"),
    "checkpoint_bytes_per_s": (3e8, "to the place of checkpoints"),
    "changed": (0.4, "share of the bytes that change between two checkpoints"),
    "stall": (0.02, "share of the writing time that training loses"),
    "protecting": (0.07, "mode ps: share of the speed that each parity partition of a stripe costs"),
}
NAMES: Final = tuple(_DEFAULTS)
_SHARES: Final = frozenset({"rebuilding", "changed", "stall", "protecting"})
_ABOVE_ZERO: Final = frozenset({"samples_per_s", "batch_s", "copy_bytes_per_s", "rebuild_bytes_per_s"}) | {
    "checkpoint_bytes_per_s",
    "rebuilding",
}


class MeasuredJob:
    """Is a job known by numbers. ``figures``: by name; what is missing is assumed. ``rates``: samples per second of so
    many workers together, where that was measured: between two of them it is interpolated, and beyond the last one
    each worker adds as much as there on average. ``forks``: seconds that a worker needs to start where so many start at
    a time."""

    def __init__(
        self,
        figures: Mapping[str, Figure] | None = None,
        rates: Iterable[tuple[int, float]] = (),
        forks: Iterable[tuple[int, float]] = (),
    ) -> None:
        self.figures = {name: Figure(value, ASSUMED) for name, (value, _) in _DEFAULTS.items()}
        self.figures.update(figures or {})
        self.rates, self.forks = sorted(rates), sorted(forks)

    def __repr__(self) -> str:
        return f"<job of {self.figures['samples_per_s'].value:g} samples/s a worker>"

    def _of(self, name: str) -> float:
        return self.figures[name].value

    def with_figures(self, more: Mapping[str, Figure]) -> MeasuredJob:
        """Return the same job with other numbers. What is told replaces what was measured."""
        rates = () if "samples_per_s" in more else self.rates
        return MeasuredJob({**self.figures, **more}, rates, () if "fork_s" in more else self.forks)

    def rate(self, workers: int) -> float:
        if not self.rates or workers <= 0:
            return workers * self._of("samples_per_s")
        before, after = (0, 0.0), None
        for known in self.rates:
            if known[0] >= workers:
                after = known
                break
            before = known
        if after is None:
            return before[1] / before[0] * workers
        return before[1] + (after[1] - before[1]) * (workers - before[0]) / (after[0] - before[0])

    @property
    def batch_samples(self) -> int:
        return max(1, round(self._of("batch_s") * self.rate(1)))

    @property
    def agent_s(self) -> float:
        return self._of("agent_s")

    @property
    def fork_s(self) -> float:
        return self._of("fork_s")

    def start_s(self, together: int) -> float:
        """Return the time of the most that were seen to start at a time, up to ``together``."""
        known = [took for count, took in self.forks if count <= together]
        return known[-1] if known else self.forks[0][1] if self.forks else self.fork_s

    @property
    def meet_s(self) -> float:
        return self._of("meet_s")

    @property
    def switch_s(self) -> float:
        return self._of("switch_s")

    @property
    def copy_s(self) -> float:
        return self._of("state_bytes") / self._of("copy_bytes_per_s")

    @property
    def detect_s(self) -> float:
        return self._of("detect_s")

    @property
    def restore_s(self) -> float:
        return self._of("state_bytes") / self._of("checkpoint_bytes_per_s")

    @property
    def rebuilding(self) -> float:
        return self._of("rebuilding")

    def build_s(self, share: float) -> float:
        return share * self._of("state_bytes") / self._of("rebuild_bytes_per_s")

    def write_s(self, full: bool) -> float:
        share = 1.0 if full else self._of("changed")
        return share * self._of("state_bytes") / self._of("checkpoint_bytes_per_s")

    @property
    def stall(self) -> float:
        return self._of("stall")

    @property
    def protecting(self) -> float:
        return self._of("protecting")


def speed_left(protecting: float, parities: int) -> float:
    """Return the share of the speed that is left beside so many parity partitions of each stripe."""
    return 1.0 - min(0.9, protecting * parities)


def parse_figure(text: str) -> tuple[str, Figure]:
    """Return the number that ``--assume NAME=VALUE`` tells. Raise ConfigError with one line."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if name not in _DEFAULTS or not equals:
        raise ConfigError(f"--assume {text!r}: expected NAME=VALUE, with one of {', '.join(NAMES)}")
    try:
        if name == "state_bytes":
            number = float(size_bytes(value))
        elif name.endswith("_bytes_per_s"):
            number = float(size_bytes(value.strip().removesuffix("/s")))
        elif name.endswith("_s") and name != "samples_per_s":
            number = seconds(value)
        else:
            number = float(value)
    except (UserError, ValueError) as error:
        raise ConfigError(f"--assume {text!r}: {error}") from None
    return name, Figure(_checked(name, number, f"--assume {text!r}"), "told by --assume")


def _checked(name: str, number: float, where: str) -> float:
    if not math.isfinite(number) or number < 0 or (number == 0 and name in _ABOVE_ZERO):
        raise ConfigError(f"{where}: expected a number {'above' if name in _ABOVE_ZERO else 'of at least'} 0")
    if name in _SHARES and number > 1:
        raise ConfigError(f"{where}: expected a share from 0 to 1")
    return number


def figure_lines(model: MeasuredJob) -> list[str]:
    """Return each number with its meaning and its source, for people."""
    lines = []
    for name, figure in model.figures.items():
        lines.append(f"{name:<22} {figure.value:>14,.6g}  {_DEFAULTS[name][1]} ({figure.source})")
    if model.rates:
        words = ", ".join(f"{n}: {rate:,.6g}" for n, rate in model.rates)
        lines.append(f"{'samples_per_s together':<22} by number of workers: {words} (measured)")
    return lines
