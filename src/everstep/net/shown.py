"""What came from others, made fit for a terminal: control characters are escaped in every text of a message."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from everstep.errors import escaped

T = TypeVar("T")


def shown(value: T) -> T:
    """Return ``value`` (a message, or anything in one) with the control characters of its texts escaped."""
    made: Any = value
    if isinstance(value, str) and type(value) is str:
        made = escaped(value, 1 << 20)
    elif isinstance(value, tuple):
        made = tuple(shown(one) for one in value)
    elif isinstance(value, list):
        made = [shown(one) for one in value]
    elif isinstance(value, dict):
        made = {shown(key): shown(one) for key, one in value.items()}
    elif isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changed = {name: new for name, old in fields.items() if (new := shown(old)) is not old and new != old}
        made = msgspec.structs.replace(value, **changed) if changed else value
    return made  # type: ignore[no-any-return]
