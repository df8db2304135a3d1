"""Code goes by enums and typed fields, never by sentences that are made for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep

PROSE = {"action", "detail", "error", "how", "inputs", "reason", "rejected", "why", "words"}
LOOKS = {
    "count",
    "endswith",
    "find",
    "index",
    "partition",
    "removeprefix",
    "removesuffix",
    "rfind",
    "split",
    "startswith",
}
LOCALS = {"how", "inputs", "reason"}
SOURCES = sorted(
    path
    for path in Path(everstep.__file__).parent.rglob("*.py")
    if path.name != "earlier.py"  # reads what earlier releases wrote in words
)


def prose(node: ast.expr) -> bool:
    """``x.reason``, ``x["reason"]`` or ``x.get("reason")``."""
    match node:
        case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in PROSE
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return name in PROSE
    return False


def local(node: ast.expr) -> bool:
    """``reason``."""
    return isinstance(node, ast.Name) and node.id in LOCALS


def typed(node: ast.expr) -> bool:
    """``CheckpointReason.FINAL``, or several of these, or None."""
    match node:
        case ast.Attribute(value=ast.Name(id=name)):
            return name[0].isupper() and not name.isupper()
        case ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return all(map(typed, parts))
        case ast.Constant(value=None):
            return True
    return False


def string(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str(value)):
            return value != ""
        case ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.List(elts=parts):
            return any(map(string, parts))
    return False


def offences(tree: ast.AST) -> Iterator[int]:
    """Lines where a text is compared or searched."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=rest):
                sides = [left, *rest]
                within = any(isinstance(op, ast.In | ast.NotIn) for op in ops)
                if not within and not any(isinstance(op, ast.Eq | ast.NotEq) for op in ops):
                    continue
                key = within and isinstance(left, ast.Name)
                if (any(map(prose, sides)) and not any(map(typed, sides)) and not key) or (
                    any(map(local, sides)) and any(map(string, sides))
                ):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in LOOKS and prose(value):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=args) if any(map(prose, args)):
                yield node.lineno
            case ast.MatchClass(kwd_attrs=names, kwd_patterns=patterns):
                for name, pattern in zip(names, patterns, strict=True):
                    if name in PROSE and isinstance(pattern, ast.MatchValue) and string(pattern.value):
                        yield node.lineno


def test_no_code_compares_a_sentence() -> None:
    found = [
        f"{path.name}:{line}: {text.splitlines()[line - 1].strip()}"
        for path in SOURCES
        for text in [path.read_text()]
        for line in offences(ast.parse(text))
    ]
    assert not found, "use an enum of everstep.model.reasons, or a typed field:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        'if e.reason == "late": pass',
        'if "late" != e.reason: pass',
        "if e.reason == LATE: pass",
        "if e.reason in (FINAL, STOP): pass",
        'if why.action == "restart": pass',
        'if "in different groups" in i.decision.reason: pass',
        'if "error" in inputs: pass',
        'if "error" not in d.inputs: pass',
        'if e.how in ("stuck", "lost"): pass',
        'if how == "new": pass',
        'if line["action"] == "lost": pass',
        'if e.reason.startswith("no heartbeat"): pass',
        're.search("lost", note.reason)',
        'match e:\n    case Left(reason="done"): pass',
    ],
)
def test_it_is_found(line: str) -> None:
    assert list(offences(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "if e.reason is CheckpointReason.LATE: pass",
        "if e.reason in (CheckpointReason.FINAL, CheckpointReason.STOP): pass",
        "if not e.reason: pass",
        'if e.kind == "sync": pass',
        "if member in decision.inputs: pass",
    ],
)
def test_that_is_fine(line: str) -> None:
    assert not list(offences(ast.parse(line)))
