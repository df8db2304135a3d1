"""Reads flags that are a number of members, or the word auto."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from everstep.config.sized import AUTO

if TYPE_CHECKING:
    _Base = click.ParamType[int | str]
else:  # (before click 8.3 it takes no type)
    _Base = click.ParamType


class CountOrAuto(_Base):
    """Is a number, or the word auto."""

    name = "integer or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number or ``AUTO``."""
        if value == AUTO:
            return AUTO
        number: int = click.INT.convert(value, param, ctx)
        return number
