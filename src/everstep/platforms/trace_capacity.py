"""``--capacity trace:FILE``: a recorded cloud gives machines, which are agents on this machine, and takes them back."""

from __future__ import annotations

import gzip
import itertools
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from everstep.errors import ConfigError
from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, Grant, Market, Offer
from everstep.platforms.traces import Trace, TraceError, TraceMarket, parse_trace, price_class, timeline_of

TRACE_MAX_BYTES = 64 << 20


def read_trace(path: Path) -> Trace:
    """Return the machines of a recording, which may be compressed (.gz). Raise ConfigError with one line."""
    try:
        with path.open("rb") as file:
            raw = file.read(TRACE_MAX_BYTES + 1)
        if raw[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                raw = file.read(TRACE_MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"trace {str(path)!r}: truncated or damaged: {error}") from None
    except OSError as error:
        raise ConfigError(f"trace {str(path)!r}: cannot be read: {error.strerror or error}") from None
    if len(raw) > TRACE_MAX_BYTES:
        raise ConfigError(f"trace {str(path)!r}: larger than {TRACE_MAX_BYTES >> 20} MB")
    try:
        return parse_trace(raw.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"trace {str(path)!r}: no text") from None
    except TraceError as error:
        raise ConfigError(f"trace {str(path)!r}: {error}") from None


class TraceCapacity:
    """Plays a recording from the first ``watch`` on, by ``now`` (seconds of a clock that never jumps)."""

    every_s = 0.1

    def __init__(
        self,
        path: Path,
        speed: float = 1.0,
        quiet_s: float = 0.0,
        lead_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take ``lead_s``: seconds between a notice and the end of its machine, as they pass here; 0: no notices."""
        trace = read_trace(path)
        stem = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
        hardware, zone = price_class(stem)
        self.name = f"trace:{path}"
        self._market = TraceMarket(
            trace, timeline_of(trace, speed, quiet_s), Offer(hardware, zone, Market.SPOT), lead_s
        )
        self._now, self._began = now, -1.0
        self._hardware, self._zone = hardware, zone
        self._staying: list[NodeId] = []
        self._on_demand = 0

    def __repr__(self) -> str:
        return f"<{self._market!r} of {self.name}>"

    @property
    def most(self) -> int:
        """Return machines that the recording has at a time, at most."""
        return self._market.trace.most

    def offers(self) -> tuple[Offer, ...]:
        return self._market.offers()

    def request(self, count: int, market: Market = Market.SPOT) -> None:
        """On-demand machines, which recordings do not have, are there at once, in any number."""
        if market is Market.ON_DEMAND:
            self._on_demand = count
        else:
            self._market.request(count)

    def release(self, node: NodeId) -> None:
        if node in self._staying:
            self._staying.remove(node)
        else:
            self._market.release(node)

    def watch(self) -> tuple[CapacityNews, ...]:
        if self._began < 0:
            self._began = self._now()
        return (*self._grant_staying(), *self._market.until(self._now() - self._began))

    def _grant_staying(self) -> list[CapacityNews]:
        """Return the on-demand machines that are asked for and not held yet."""
        news: list[CapacityNews] = []
        while len(self._staying) < self._on_demand:
            number = next(n for n in itertools.count(1) if f"on-demand-{n}" not in self._staying)
            node = NodeId(f"on-demand-{number}")
            self._staying.append(node)
            recorded_s = self._market.timeline.recorded(self._now() - self._began)
            news.append(Grant(node, Offer(self._hardware, self._zone, Market.ON_DEMAND), recorded_s))
        return news

    def close(self) -> None:
        pass
