"""Parses ``--capacity``: the names of where further machines come from."""

from __future__ import annotations

import re
import shlex
from typing import Final, NamedTuple

from everstep.bounds import PLACE_NAME
from everstep.errors import ConfigError

KINDS: Final = ("trace", "command", "ray", "slurm")
CLUSTERS: Final = ("ray", "slurm")
"""These need no more words: their nodes are asked for by ``--nodes``."""


class CapacityName(NamedTuple):
    """Names where machines come from. ``rest``: its file or words."""

    kind: str
    rest: str


def parse_capacity(text: str, where: str = "--capacity") -> CapacityName:
    """Return the source of machines that ``text`` names. Raise ConfigError, which names ``where``."""
    if not text:
        return CapacityName("", "")
    kind, _, rest = text.partition(":")
    rest = rest.strip()
    if kind not in KINDS or (not rest and kind not in CLUSTERS):
        raise ConfigError(
            f"{where}: {text!r} is no source of machines: there are trace:FILE, command:WORDS, ray[:HOST:PORT] and "
            "slurm"
        )
    if kind == "slurm" and rest:
        raise ConfigError(f"{where}: {text!r}: slurm takes no address: SLURM_CONF says where it is")
    if kind == "command":
        try:
            shlex.split(rest)
        except ValueError as error:
            raise ConfigError(f"{where}: {text!r}: {error}") from None
    return CapacityName(kind, rest)


def check_zone(zone: str, where: str = "--zone") -> None:
    """Raise ConfigError, which names ``where``, unless ``zone`` can be the name of a place."""
    if re.search(PLACE_NAME, zone) is None:
        raise ConfigError(f"{where}: expected one line of at most 255 characters")
