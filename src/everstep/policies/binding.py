"""Says what binds a job now, and what more workers or more ps would give: from the model of speed of policy ``auto``.

The model gets the windows of all sizes that this master has seen. With one size only the shares of waiting tell the
roles apart, and the uncertainty is larger.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from everstep.model.member import Role
from everstep.model.observation import Observations
from everstep.policies.auto import Size, WindowRead, is_steady, read_window, size_seen
from everstep.policies.speed_model import SpeedModel

_KEPT: Final = 8  # windows of one size
_SIZES: Final = 32
_NOTHING: Final = 0.01  # a gain below this is none

_WORDS: Final = {"workers": "workers' own compute", "shared": "what workers share (data, cores)", "ps": "ps service"}


class Cores(NamedTuple):
    """Is how busy the machines of one role are. ``busy``: cores that its members use; ``cores``: of these machines."""

    busy: float
    cores: float

    def __str__(self) -> str:
        return f"{self.busy:.1f} of {self.cores:.0f} cores busy"


class BoundJob(NamedTuple):
    """Says what binds: ``resource`` (workers, shared or ps), the shares of the time that each would save, and what one
    change would give: so many ``more`` of ``role``, by ``gain`` +- ``deviation`` (0.38: 38 %)."""

    resource: str
    shares: Mapping[str, float]
    role: Role
    more: int
    gain: float
    deviation: float

    def words(self, cores: Mapping[Role, Cores]) -> str:
        """Return ``ps service binds (52 % of the time, 3.1 of 4 cores busy); 2 more ps would give +38 % +- 6``."""
        role = Role.PS if self.resource == "ps" else Role.WORKER
        busy = f", {cores[role]}" if role in cores else ""
        words = f"{_WORDS[self.resource]} binds ({100 * self.shares[self.resource]:.0f} % of the time{busy})"
        if self.gain < _NOTHING:
            return f"{words}; neither more workers nor more ps would make it faster"
        name = "ps" if self.role is Role.PS else "worker" if self.more == 1 else "workers"
        return f"{words}; {self.more} more {name} would give {100 * self.gain:+.0f} % +- {100 * self.deviation:.0f}"


class BindingWatch:
    """Remembers windows by size. ``take`` what is seen, about once in a window; ``look`` at any time."""

    def __init__(self) -> None:
        self._windows: dict[Size, deque[WindowRead]] = {}
        self._size: Size | None = None

    def __repr__(self) -> str:
        return f"<BindingWatch of {len(self._windows)} sizes>"

    def take(self, seen: Observations) -> bool:
        """Take one window, if the job is whole and all workers have readings. Return whether it was taken."""
        if not seen.workers or not is_steady(seen, seen.window_s) or (read := read_window(seen)) is None:
            return False
        self._size = len(seen.workers), len(seen.servers)
        self._windows.setdefault(self._size, deque(maxlen=_KEPT)).append(read)
        while len(self._windows) > _SIZES:
            del self._windows[next(iter(self._windows))]
        return True

    def look(self) -> BoundJob | None:
        """Return what binds at the size that was seen last; None: nothing is known, or no model fits."""
        if self._size is None:
            return None
        model = SpeedModel({size: size_seen(list(windows)) for size, windows in self._windows.items()})
        return binding_of(model, self._size) if model.fits else None


def binding_of(model: SpeedModel, size: Size) -> BoundJob:
    """Return what binds a job of this size, and the better of: more workers, more ps (half as many again)."""
    shares = model.binding(*size)
    workers, ps = size
    more_workers, more_ps = math.ceil(workers / 2), math.ceil(ps / 2)
    changes = [(Role.WORKER, more_workers, model.gain((workers + more_workers, ps), size))]
    if ps:
        changes.append((Role.PS, more_ps, model.gain((workers, ps + more_ps), size)))
    role, more, gain = max(changes, key=lambda change: change[2].mean)
    resource = max(shares, key=lambda name: shares[name])
    return BoundJob(resource, shares, role, more, gain.mean - 1, gain.deviation)
