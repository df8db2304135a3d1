"""Describes word that a node goes away."""

from __future__ import annotations

import enum

import msgspec


class Certainty(enum.StrEnum):
    CERTAIN = "certain"
    """The node goes: it is emptied at once."""
    LIKELY = "likely"
    """It may: its owner is told, and nothing is moved."""


class Notice(msgspec.Struct, frozen=True):
    """A node goes away. ``at``: when, in seconds since 1970; None: soon, nobody says when.

    ``key``: tells this event from others of the same source."""

    source: str
    key: str
    what: str
    at: float | None = None
    certainty: Certainty = Certainty.CERTAIN
