"""Does with an object what its schema says: drops unknown fields, fills in defaults, checks types and rules (CEL)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from everstep.errors import PlatformError

Problem = tuple[str, str]
_INTS = {"int32": 1 << 31, "int64": 1 << 63}


def pruned(value: Any, schema: dict[str, Any]) -> Any:
    """Return the value without fields that the schema does not know."""
    if isinstance(value, dict) and schema.get("type") == "object":
        known, more = schema.get("properties"), schema.get("additionalProperties")
        if more:
            return {k: pruned(v, more) for k, v in value.items()}
        keep = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        if known is None:
            return value if keep else {}
        return {k: pruned(v, known[k]) if k in known else v for k, v in value.items() if keep or k in known}
    if isinstance(value, list) and schema.get("items"):
        return [pruned(v, schema["items"]) for v in value]
    return value


def defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """Return the value with defaults where fields are missing."""
    if isinstance(value, dict) and schema.get("type") == "object":
        out = dict(value)
        for name, of in (schema.get("properties") or {}).items():
            if name not in out and "default" in of:
                out[name] = of["default"]
            if name in out:
                out[name] = defaulted(out[name], of)
        return out
    if isinstance(value, list) and schema.get("items"):
        return [defaulted(v, schema["items"]) for v in value]
    return value


def problems(value: Any, schema: dict[str, Any], old: Any = None, path: str = "") -> Iterator[Problem]:
    """Yield what is wrong with a value. ``old``: what it was before; None: it is new."""
    of = schema.get("type")
    if (wrong := _wrong_type(value, of)) is not None:
        yield path, f"Invalid value: {wrong}: must be of type {of}"
        return
    yield from ((path, words) for words in _bounds(value, schema))
    if isinstance(value, dict):
        for name in schema.get("required") or ():
            if name not in value:
                yield f"{path}.{name}".lstrip("."), "Required value"
        known, more = schema.get("properties") or {}, schema.get("additionalProperties")
        for name, each in value.items():
            below = known.get(name, more)
            if below:
                before = old.get(name) if isinstance(old, dict) else None
                yield from problems(each, below, before, f"{path}.{name}".lstrip("."))
        if more and len(value) > schema.get("maxProperties", len(value)):
            yield path, f"Too many: must have at most {schema['maxProperties']} items"
    if isinstance(value, list):
        for n, each in enumerate(value):
            yield from problems(each, schema.get("items") or {}, None, f"{path}[{n}]")
        yield from ((path, words) for words in _twice(value, schema))
    yield from ((path, words) for words in _broken_rules(value, schema, old))


def _wrong_type(value: Any, of: str | None) -> str | None:
    types: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if of is None or of not in types:
        return None
    right = isinstance(value, types[of]) and not (of == "integer" and isinstance(value, bool))
    return None if right else repr(value)


def _bounds(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield f"Invalid value: {value}: should be greater than or equal to {schema['minimum']}"
        if value > schema.get("maximum", value):
            yield f"Invalid value: {value}: should be less than or equal to {schema['maximum']}"
    if isinstance(value, str):
        if "enum" in schema and value not in schema["enum"]:
            words = ", ".join(f'"{word}"' for word in schema["enum"])
            yield f'Unsupported value: "{value}": supported values: {words}'
        if len(value) > schema.get("maxLength", len(value)):
            yield f"Too long: may not be more than {schema['maxLength']} bytes"
        if len(value) < schema.get("minLength", 0):
            yield f"Invalid value: should be at least {schema['minLength']} chars long"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"Invalid value: {value!r}: should match '{schema['pattern']}'"
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
        if len(value) < schema.get("minItems", 0):
            yield f"Invalid value: should have at least {schema['minItems']} items"


def _twice(value: list[Any], schema: dict[str, Any]) -> Iterator[str]:
    keys = schema.get("x-kubernetes-list-map-keys")
    of = schema.get("x-kubernetes-list-type")
    if of == "map" and keys:
        found = [tuple(str(each.get(k)) for k in keys) for each in value if isinstance(each, dict)]
    elif of == "set":
        found = [(str(each),) for each in value]
    else:
        return
    for n, key in enumerate(found):
        if key in found[:n]:
            yield f"Duplicate value: {', '.join(key)}"


def _broken_rules(value: Any, schema: dict[str, Any], old: Any) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations") or ():
        text, names = rule["rule"], {"self": value}
        if "oldSelf" in text:
            if old is None:
                continue  # (a rule about a change says nothing about what is new)
            names["oldSelf"] = old
        try:
            holds = _program(text).execute(names)
        except Exception as error:
            yield f"Invalid value: rule {text} failed: {error}"
            continue
        if holds is not True:
            yield f"Invalid value: {rule.get('message', 'failed rule: ' + text)}"


@cache
def _program(rule: str) -> Any:
    try:
        import cel
    except ImportError:
        raise PlatformError("the rules of kinds need a library: pip install 'everstep[k8s-demo]'") from None
    return cel.compile(rule)


def unusable(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield what a server would refuse in a schema itself: a default that breaks it, a rule that is none."""
    if "default" in schema:
        yield from (
            f"{path}: default: {words}" for _, words in problems(schema["default"], {**schema, "default": None})
        )
    for rule in schema.get("x-kubernetes-validations") or ():
        try:
            _program(rule["rule"])
        except PlatformError:
            raise
        except Exception as error:
            yield f"{path}: rule {rule['rule']}: {error}"
    if schema.get("type") == "object" and schema.get("properties") is not None and schema.get("additionalProperties"):
        yield f"{path}: properties and additionalProperties are mutually exclusive"
    for name, below in (schema.get("properties") or {}).items():
        yield from unusable(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from unusable(schema[name], f"{path}[{name}]")
