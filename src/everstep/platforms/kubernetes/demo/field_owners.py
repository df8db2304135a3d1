"""Knows who wrote which field, and merges what a manager applies: server-side apply. Lists are written whole, but those
that the schema calls maps."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from everstep.platforms.kubernetes.api_client import ApiReason
from everstep.platforms.kubernetes.demo.refusals import RefusedRequest
from everstep.platforms.kubernetes.kinds import Object

Path = tuple[str, ...]
_SYSTEM = ("apiVersion", "kind")
_META = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")


def leaves(value: Any, schema: dict[str, Any] | None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each field with its value. An empty object is a field itself."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            if (not path and name in _SYSTEM) or (path == ("metadata",) and name in _META):
                continue
            below = (schema or {}).get("properties", {}).get(name) if schema else None
            yield from leaves(each, below, (*path, name))
    elif isinstance(value, list) and (keys := (schema or {}).get("x-kubernetes-list-map-keys")):
        for each in value:
            key = json.dumps({k: each.get(k) for k in keys}, sort_keys=True)
            yield from leaves(each, (schema or {}).get("items"), (*path, f"k:{key}"))
    else:
        yield path, value


def apply(
    old: Object | None,
    given: Object,
    schema: dict[str, Any] | None,
    owners: dict[str, set[Path]],
    manager: str,
    force: bool,
) -> tuple[Object, dict[str, set[Path]]]:
    """Return the object, and who owns what, after ``manager`` has applied ``given``. Raises RefusedRequest: a field
    with another value is somebody else's."""
    now = dict(leaves(given, schema))
    before = dict(leaves(old, schema)) if old is not None else {}
    out = {name: set(paths) for name, paths in owners.items()}
    clashes = []
    for path, value in now.items():
        for name, paths in out.items():
            if name == manager or before.get(path) == value:
                continue
            theirs = {p for p in paths if p == path or p[: len(path)] == path or path[: len(p)] == p}
            if theirs:
                clashes.append((name, path))
                if force:
                    paths -= theirs
    if clashes and not force:
        causes = tuple(("FieldManagerConflict", f'conflict with "{who}": .{".".join(p)}') for who, p in clashes)
        words = "; ".join(message for _, message in causes)
        raise RefusedRequest(ApiReason.CONFLICT, f"Apply failed with {len(clashes)} conflicts: {words}", causes)
    result: Object = copy.deepcopy(old) if old is not None else {}
    for path in out.get(manager, set()) - set(now):
        if not any(path in paths for name, paths in out.items() if name != manager):
            _remove(result, path)
    _merge(result, given, schema)
    out[manager] = set(now)
    return result, {name: paths for name, paths in out.items() if paths}


def wrote(
    old: Object, new: Object, schema: dict[str, Any] | None, owners: dict[str, set[Path]], manager: str
) -> dict[str, set[Path]]:
    """Return who owns what after ``manager`` has written an object without apply: what it changed is its own."""
    before, now = dict(leaves(old, schema)), dict(leaves(new, schema))
    changed = {path for path, value in now.items() if path not in before or before[path] != value}
    out = {name: {p for p in paths if p in now} - changed for name, paths in owners.items()}
    out[manager] = out.get(manager, set()) | changed
    return {name: paths for name, paths in out.items() if paths}


def _merge(into: Any, given: Any, schema: dict[str, Any] | None) -> None:
    for name, value in given.items():
        below = (schema or {}).get("properties", {}).get(name) if schema else None
        keys = (below or {}).get("x-kubernetes-list-map-keys")
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value, below)
        elif keys and isinstance(value, list) and isinstance(into.get(name), list):
            for each in value:
                held = next((h for h in into[name] if all(h.get(k) == each.get(k) for k in keys)), None)
                if held is None:
                    into[name].append(copy.deepcopy(each))
                else:
                    _merge(held, each, (below or {}).get("items"))
        else:
            into[name] = copy.deepcopy(value)


def _remove(thing: Any, path: Path) -> None:
    if isinstance(thing, dict):
        name, *rest = path
        if not rest:
            thing.pop(name, None)
        elif name in thing:
            _remove(thing[name], tuple(rest))
            if thing[name] in ({}, []):
                del thing[name]
    elif isinstance(thing, list) and path[0].startswith("k:"):
        key = json.loads(path[0][2:])
        for each in list(thing):
            if all(each.get(k) == v for k, v in key.items()):
                if len(path) > 1:
                    _remove(each, path[1:])
                if len(path) == 1 or not set(each) - set(key):
                    thing.remove(each)
