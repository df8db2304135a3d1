"""Parses ``--notices``: the names of those that are asked whether a node goes away."""

from __future__ import annotations

import shlex
from typing import Final, NamedTuple

from everstep.errors import ConfigError

CLOUDS: Final = ("aws", "gcp", "azure", "alibaba")


class SourceName(NamedTuple):
    """Names one source of notices. ``rest``: its address, path or words; "" where not given."""

    kind: str
    rest: str


def parse_notices(text: str, where: str = "--notices") -> tuple[SourceName, ...]:
    """Parse the names of several sources, with commas between them. ``where``: what the ConfigError, which it raises,
    names."""
    out = []
    for word in (w.strip() for w in text.split(",") if w.strip()):
        kind, _, rest = word.partition(":")
        rest = rest.strip()
        if kind not in CLOUDS and not (kind in ("file", "command") and rest):
            raise ConfigError(
                f"{where}: {word!r} is no source of notices: there are {', '.join(CLOUDS)}, file:PATH and command:WORDS"
            )
        if kind == "command":
            try:
                shlex.split(rest)
            except ValueError as error:
                raise ConfigError(f"{where}: {word!r}: {error}") from None
        out.append(SourceName(kind, rest))
    return tuple(out)
