"""Describes machines that come and go: what may be had, what is held, and what became of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from everstep.ids import NodeId


class Market(StrEnum):
    ON_DEMAND = "on_demand"
    """The machine stays until it is given back."""
    SPOT = "spot"
    """The platform may take the machine back at any time."""


class Offer(msgspec.Struct, frozen=True):
    """Is the machines of one kind that a platform has now.

    ``hardware``: the class of the machine, as prices name it. ``price``: USD for an hour of one machine; None: not
    known, which is not zero. ``count``: how many can be had."""

    hardware: str
    zone: str = ""
    market: Market = Market.ON_DEMAND
    price: float | None = None
    count: int = 1


class Grant(msgspec.Struct, frozen=True):
    """Is one machine that the job holds from now on.

    ``node``: the name of its agent. ``recorded_s``: when that was in the recording, in seconds since its start; None
    where nothing is played."""

    node: NodeId
    offer: Offer
    recorded_s: float | None = None


class Warned(msgspec.Struct, frozen=True):
    """The platform takes a machine back in ``in_s`` seconds; None: soon, nobody says when."""

    node: NodeId
    in_s: float | None = None
    recorded_s: float | None = None


class Gone(msgspec.Struct, frozen=True):
    """The platform has taken a machine back."""

    node: NodeId
    recorded_s: float | None = None


CapacityNews = Grant | Warned | Gone
"""What a source of machines tells since it was asked last."""


RETURNS_A_LIFE: Final = 1000
"""Each further machine of a name counts from so much more how often it was emptied and stayed (``returns``)."""


class CapacityStep(StrEnum):
    """Says what became of a machine."""

    GRANTED = "granted"
    WARNED = "warned"
    TAKEN_BACK = "taken back"
    GIVEN_BACK = "given back"


def offer_words(offer: Offer) -> str:
    """Return an offer in words: ``v100 in us-east-1f, spot, 0.918 USD/h``."""
    where = f" in {offer.zone}" if offer.zone else ""
    price = f", {offer.price:.4g} USD/h" if offer.price is not None else ""
    return f"{offer.hardware or 'a machine'}{where}, {offer.market.value.replace('_', '-')}{price}"
