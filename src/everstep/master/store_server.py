"""Is the key-value store over which members of a group find each other: in memory, bounded, gone with its
generation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from everstep.brain.events import Ok, Refused
from everstep.net.messages import StoreValues

MAX_VALUE_BYTES = 1 << 20
MAX_BYTES = 512 << 20  # of one generation
MAX_KEY_BYTES = 1024
MAX_KEYS = 1 << 20  # of one generation
MAX_WAIT_S = 60.0
GENERATIONS_KEPT = 3  # a group may still connect while the next ones are published

Place = tuple[int, str]  # generation, attempt


class _Waiter:
    """Is one request that waits for ``missing`` keys."""

    __slots__ = ("future", "keys", "missing", "place", "timer")

    def __init__(self, place: Place, keys: Sequence[str], missing: set[str], future: asyncio.Future[StoreValues]):
        self.place, self.keys, self.missing, self.future = place, keys, missing, future
        self.timer: asyncio.TimerHandle | None = None


class StoreServer:
    """Stores keys: ``set`` and ``get`` are as the requests StoreSet and StoreGet want it. For one asyncio loop."""

    def __init__(self) -> None:
        self._values: dict[Place, dict[str, bytes]] = {}
        self._waiting: dict[tuple[Place, str], list[_Waiter]] = {}
        self._bytes: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._oldest = 0

    def __repr__(self) -> str:
        waiters = {id(w) for ws in self._waiting.values() for w in ws}
        return f"<store {len(self._values)} attempts, {sum(self._bytes.values())} bytes, {len(waiters)} waiting>"

    def set(self, generation: int, attempt: str, values: Mapping[str, bytes]) -> Ok | Refused:
        """Keep these values; whoever waits for them gets them. A key may be set again."""
        refused = self._refuse(generation, attempt, values)
        if refused:
            return Refused(refused)
        size = sum(len(k) + len(v) for k, v in values.items())
        if self._bytes.get(generation, 0) + size > MAX_BYTES or self._keys.get(generation, 0) + len(values) > MAX_KEYS:
            return Refused(f"the store of generation {generation} is full ({MAX_BYTES} bytes, {MAX_KEYS} keys)")
        self._bytes[generation] = self._bytes.get(generation, 0) + size
        self._keys[generation] = self._keys.get(generation, 0) + len(values)
        place = (generation, attempt)
        kept = self._values.setdefault(place, {})
        kept.update(values)
        for key in values:
            for waiter in self._waiting.pop((place, key), ()):
                waiter.missing.discard(key)
                if not waiter.missing:
                    self._answer(waiter)
        return Ok()

    def get(
        self, generation: int, attempt: str, keys: Sequence[str], wait_s: float
    ) -> StoreValues | Refused | asyncio.Future[StoreValues]:
        """Return all of ``keys``, as soon as they are there; those that are after ``wait_s`` seconds."""
        if generation < self._oldest:
            return Refused(f"generation {generation} is over")
        if not math.isfinite(wait_s):
            return Refused(f"wait_s = {wait_s}: must be a number of seconds, at most {MAX_WAIT_S:g}")
        place = (generation, attempt)
        kept = self._values.get(place, {})
        missing = {key for key in keys if key not in kept}
        if not missing or wait_s <= 0:
            return self._found(place, keys)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(place, tuple(keys), missing, loop.create_future())
        for key in missing:
            self._waiting.setdefault((place, key), []).append(waiter)
        waiter.timer = loop.call_later(min(wait_s, MAX_WAIT_S), self._give_up, waiter)
        waiter.future.add_done_callback(lambda future: self._give_up(waiter) if future.cancelled() else None)
        return waiter.future

    def forget(self, newest: int) -> None:
        """Generation ``newest`` was published: those long before it are over."""
        self._oldest = max(self._oldest, newest - GENERATIONS_KEPT + 1)
        for place in [place for place in self._values if place[0] < self._oldest]:
            del self._values[place]
        for waiter in {w for (place, _), ws in self._waiting.items() if place[0] < self._oldest for w in ws}:
            self._give_up(waiter)
        for counts in (self._bytes, self._keys):
            for generation in [g for g in counts if g < self._oldest]:
                del counts[generation]

    def _refuse(self, generation: int, attempt: str, values: Mapping[str, bytes]) -> str:
        if generation < self._oldest:
            return f"generation {generation} is over"
        if len(attempt) > MAX_KEY_BYTES:
            return f"attempt of {len(attempt)} characters: at most {MAX_KEY_BYTES}"
        for key, value in values.items():
            if len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
                return f"key {key[:64]!r}: {len(value)} bytes, at most {MAX_VALUE_BYTES} (key: {MAX_KEY_BYTES})"
        return ""

    def _found(self, place: Place, keys: Sequence[str]) -> StoreValues:
        kept = self._values.get(place, {})
        return StoreValues({key: kept[key] for key in keys if key in kept})

    def _answer(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        if not waiter.future.done():
            waiter.future.set_result(self._found(waiter.place, waiter.keys))

    def _give_up(self, waiter: _Waiter) -> None:
        for key in waiter.missing:
            waiting = self._waiting.get((waiter.place, key), [])
            if waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._waiting[waiter.place, key]
        self._answer(waiter)
