"""Says what machines cost: a book of prices by class, zone and market over time. Pure.

A file of prices is CSV with a header, or JSON with a list of objects. Its columns:

- ``class`` (also ``instance_type``): of the machine;
- ``zone``: where; empty or left out: everywhere;
- ``market``: ``spot`` or ``on_demand``;
- ``from`` (also ``timestamp``): from when the price holds, ISO 8601, in UTC where no zone is named; empty or left out:
  always;
- ``usd_per_hour``: of one machine.

A recording of spot prices has ``price_usd_per_hour`` instead of ``market`` and ``usd_per_hour``, and may have
``on_demand_usd_per_hour``. A price holds until the next row of its class, zone and market, whose times must ascend.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from everstep.errors import UserError
from everstep.model.capacity import Market

ROWS_MAX: Final = 5_000_000
USD_MAX: Final = 1e6


class PriceError(UserError):
    """A file of prices is not what it should be."""


class PriceRow(NamedTuple):
    """Is a price from a moment on. ``at``: from when it holds, seconds since 1970; minus infinity: always. ``usd``: for
    an hour."""

    hardware: str
    zone: str
    market: Market
    at: float
    usd: float


class PriceSpan(NamedTuple):
    """Is one price from ``begin`` to ``end``, seconds since 1970. ``usd``: for an hour; None: not known."""

    begin: float
    end: float
    usd: float | None


class PriceBook:
    """Holds prices by class, zone and market. A price without a zone holds where the zone has none of its own."""

    def __init__(self, rows: Iterable[PriceRow] = ()) -> None:
        """Take the rows of one class, zone and market in order of time. Raise PriceError if they are not."""
        self._times: dict[tuple[str, str, Market], list[float]] = {}
        self._usd: dict[tuple[str, str, Market], list[float]] = {}
        for row in rows:
            self.add(row)

    def __repr__(self) -> str:
        return f"<{sum(map(len, self._times.values()))} prices of {len({h for h, _, _ in self._times})} classes>"

    @property
    def classes(self) -> tuple[str, ...]:
        """Return classes of machines that have prices."""
        return tuple(sorted({hardware for hardware, _, _ in self._times}))

    def add(self, row: PriceRow) -> None:
        """Raise PriceError if the row is older than the one before it, or its price is none."""
        if not (math.isfinite(row.usd) and 0 <= row.usd <= USD_MAX):
            raise PriceError(f"{row.usd} USD for an hour of {row.hardware} is no price: expected 0 to {USD_MAX:,.0f}")
        key = (row.hardware, row.zone, row.market)
        times = self._times.setdefault(key, [])
        if times and row.at < times[-1]:
            raise PriceError(
                f"out of order: a price of {row.hardware} in {row.zone or 'any zone'} ({row.market.value}) is older "
                "than the one before it"
            )
        times.append(row.at)
        self._usd.setdefault(key, []).append(row.usd)

    def price(self, hardware: str, zone: str, market: Market, at: float) -> tuple[float | None, float]:
        """Return the price at ``at`` (None: not known), and until when it holds (infinity: for good)."""
        key = (hardware, zone, market)
        if key not in self._times:
            key = (hardware, "", market)
        times, usd = self._times.get(key, []), self._usd.get(key, [])
        i = bisect_right(times, at)
        return (usd[i - 1] if i else None), (times[i] if i < len(times) else math.inf)

    def spans(self, hardware: str, zone: str, market: Market, begin: float, end: float) -> list[PriceSpan]:
        """Return the prices from ``begin`` to ``end``, without holes: a time without a price has None."""
        key = (hardware, zone, market)
        if key not in self._times:
            key = (hardware, "", market)
        times, usd = self._times.get(key, []), self._usd.get(key, [])
        out: list[PriceSpan] = []
        i = bisect_right(times, begin) - 1
        while begin < end:
            until = min(end, times[i + 1]) if i + 1 < len(times) else end
            if until > begin:
                out.append(PriceSpan(begin, until, usd[i] if i >= 0 else None))
                begin = until
            i += 1
        return out


def parse_prices(text: str) -> PriceBook:
    """Return the book of a file of prices. Raise PriceError with one line that names the place."""
    text = text.strip()
    if not text:
        raise PriceError("it is empty")
    if text[0] in "[{":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PriceError(f"it is truncated, or no JSON: {error}") from None
        rows = found.get("prices") if isinstance(found, dict) else found
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise PriceError('expected a list of objects such as {"class": "g5.xlarge", "market": "spot", ...}')
        return _book((f"entry {n}", row) for n, row in enumerate(rows, 1))
    reader = csv.reader(text.split("\n"))
    try:
        header = [name.strip() for name in next(reader)]
        return _book(_csv_rows(header, reader))
    except csv.Error as error:
        raise PriceError(f"line {reader.line_num}: {error}") from None


def _csv_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for number, cells in enumerate(rows, 2):
        if cells and len(cells) != len(header):
            raise PriceError(f"line {number}: {len(cells)} cells, and the header has {len(header)}: is it truncated?")
        if cells:
            yield f"line {number}", dict(zip(header, (cell.strip() for cell in cells), strict=True))


def _book(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> PriceBook:
    book, count = PriceBook(), 0
    for where, row in rows:
        count += 1
        if count > ROWS_MAX:
            raise PriceError(f"more than {ROWS_MAX:,} prices")
        try:
            for one in _prices_of(row):
                book.add(one)
        except PriceError as error:
            raise PriceError(f"{where}: {error}") from None
    if not count:
        raise PriceError("it has no prices")
    return book


def _prices_of(row: Mapping[str, Any]) -> Iterable[PriceRow]:
    hardware = row.get("class", row.get("instance_type"))
    if not isinstance(hardware, str) or not hardware:
        raise PriceError(f"class = {hardware!r}: expected the class of a machine")
    zone = row.get("zone") or ""
    if not isinstance(zone, str):
        raise PriceError(f"zone = {zone!r}: expected a text")
    at = _time(row.get("from", row.get("timestamp")))
    if "price_usd_per_hour" in row:
        yield PriceRow(hardware, zone, Market.SPOT, at, _usd("price_usd_per_hour", row))
        if row.get("on_demand_usd_per_hour") not in (None, ""):
            yield PriceRow(hardware, zone, Market.ON_DEMAND, at, _usd("on_demand_usd_per_hour", row))
        return
    try:
        market = Market(str(row.get("market")))
    except ValueError:
        raise PriceError(f"market = {row.get('market')!r}: expected spot or on_demand") from None
    yield PriceRow(hardware, zone, market, at, _usd("usd_per_hour", row))


def _usd(column: str, row: Mapping[str, Any]) -> float:
    value = row.get(column)
    if value is None or value == "":
        raise PriceError(f"{column} is missing")
    try:
        usd = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        usd = math.nan
    if not (math.isfinite(usd) and 0 <= usd <= USD_MAX):
        raise PriceError(f"{column} = {value!r}: expected USD for an hour, 0 to {USD_MAX:,.0f}")
    return usd


def _time(value: object) -> float:
    if value is None or value == "":
        return -math.inf
    try:
        return moment(str(value))
    except ValueError:
        raise PriceError(f"from = {value!r}: expected a time such as 2026-01-31T12:00:00Z") from None


def moment(text: str) -> float:
    """Return seconds since 1970 of an ISO 8601 time, in UTC where it names no zone. Raise ValueError."""
    at = datetime.datetime.fromisoformat(text)
    return (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()
