"""``--capacity command:WORDS``: a script of the user says what machines there are, gets them and gives them back.

The script is called as ``WORDS VERB ARGUMENT...``:

- ``offers``: prints one line of JSON for each kind of machine, such as ``{"class": "g5.xlarge", "zone": "eu-1a",
  "market": "spot", "price": 0.31, "count": 4}``;
- ``request N``: the job wants N machines in all; ``request N on_demand`` (``--fallback``): besides, N that stay, in
  place of spot machines that are lacking; ``release NODE``: it gives one back;
- ``watch``: prints what has happened since it was called last, one line of JSON each:
  ``{"what": "granted", "node": "n1", "class": ..., "zone": ..., "market": ..., "price": ...}``,
  ``{"what": "warned", "node": "n1", "in_s": 30}``, ``{"what": "gone", "node": "n1"}``.

It ends with 0. ``EVERSTEP_JOIN`` and ``EVERSTEP_SECRET_FILE`` say where its machines join: each of them runs
``everstep agent --join $EVERSTEP_JOIN --node NODE --secret-file FILE``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from everstep.bounds import MALFORMED, MEMBERS_MAX, PlaceName
from everstep.errors import PlatformError, escaped
from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, Gone, Grant, Market, Offer, Warned
from everstep.platforms.commands import run_command

LIMIT_S = 10.0
PRINTED_MAX_BYTES = 64 << 10

_Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class _OfferLine(msgspec.Struct, forbid_unknown_fields=True):
    hardware: PlaceName = msgspec.field(name="class")
    zone: PlaceName = ""
    market: Market = Market.ON_DEMAND
    price: _Price | None = None
    count: Annotated[int, msgspec.Meta(ge=0, le=MEMBERS_MAX)] = 1


class _NewsLine(msgspec.Struct, forbid_unknown_fields=True):
    what: Literal["granted", "warned", "gone"]
    node: NodeId
    hardware: PlaceName = msgspec.field(name="class", default="")
    zone: PlaceName = ""
    market: Market = Market.ON_DEMAND
    price: _Price | None = None
    in_s: Annotated[float, msgspec.Meta(ge=0, le=1e7)] | None = None


_offer_decoder = msgspec.json.Decoder(_OfferLine)
_news_decoder = msgspec.json.Decoder(_NewsLine)


class CommandCapacity:
    """Is a source of machines behind a script. ``every_s``: how often it is asked for news."""

    def __init__(
        self, words: str, env: Mapping[str, str] | None = None, every_s: float = 5.0, limit_s: float = LIMIT_S
    ) -> None:
        """Take ``env``: more variables for the script. Raise PlatformError if ``words`` are none."""
        self._argv = shlex.split(words)
        if not self._argv:
            raise PlatformError("capacity: the command has no words")
        self.name = f"command:{self._argv[0]}"
        self.every_s, self._limit_s, self._env = every_s, limit_s, dict(env or {})
        self._rest: list[str] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def offers(self) -> tuple[Offer, ...]:
        found = []
        for line in self._ask("offers"):
            try:
                o = _offer_decoder.decode(line)
            except MALFORMED as error:
                raise self._garbage("offers", line, error) from None
            found.append(Offer(o.hardware, o.zone, o.market, o.price, o.count))
        return tuple(found)

    def request(self, count: int, market: Market = Market.SPOT) -> None:
        self._ask("request", str(count), *([market.value] if market is Market.ON_DEMAND else []))

    def release(self, node: NodeId) -> None:
        self._ask("release", node)

    def watch(self) -> tuple[CapacityNews, ...]:
        """Return the news: lines before a wrong one count; those behind it are told with the next call."""
        self._rest = self._rest or self._ask("watch")
        out: list[CapacityNews] = []
        while self._rest:
            line = self._rest[0]
            try:
                news = _news_of(_news_decoder.decode(line))
            except (*MALFORMED, PlatformError) as error:
                if out:
                    break  # (what is told here is told first)
                self._rest.pop(0)
                raise self._garbage("watch", line, error) from None
            self._rest.pop(0)
            out.append(news)
        return tuple(out)

    def close(self) -> None:
        pass

    def _ask(self, verb: str, *args: str) -> list[str]:
        try:
            env = {**os.environ, **self._env}
            code, text = run_command([*self._argv, verb, *args], self._limit_s, PRINTED_MAX_BYTES, env)
        except PlatformError as error:
            raise PlatformError(f"{verb}: {error}") from None
        if code != 0:
            raise PlatformError(f"{verb}: exit code {code}; 0 was expected")
        return [line for line in text.splitlines() if line.strip()]

    @staticmethod
    def _garbage(verb: str, line: str, error: Exception) -> PlatformError:
        return PlatformError(f"{verb}: its line {escaped(line, 80)!r} is not what was expected: {escaped(str(error))}")


def _news_of(line: _NewsLine) -> CapacityNews:
    if not line.node or line.node == "node0":
        raise PlatformError(f"node {line.node!r} is no name of a further node")
    if line.what == "granted":
        return Grant(line.node, Offer(line.hardware, line.zone, line.market, line.price))
    return Warned(line.node, line.in_s) if line.what == "warned" else Gone(line.node)
