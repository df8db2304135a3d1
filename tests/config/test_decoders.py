"""What is read is decoded by decoders that are made when their module is."""

from __future__ import annotations

import ast
from pathlib import Path

import everstep

SOURCES = Path(everstep.__file__).parent


def test_no_type_is_looked_at_for_the_first_time_by_several_threads() -> None:
    """``msgspec.json.decode(data, type=T)`` builds what it knows of T at its first call. Two threads that make this
    call at once end the process (msgspec 0.22: a null dereference; seen in a ps whose threads loaded a checkpoint).
    A ``Decoder(T)`` of the module has it before there are threads."""
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "decode"
        and any(keyword.arg == "type" for keyword in node.keywords)
    ]
    assert found == []
