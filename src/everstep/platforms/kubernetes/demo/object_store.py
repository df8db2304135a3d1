"""Holds objects with versions, and the log that watches read."""

from __future__ import annotations

import copy
import threading
import time
from typing import Final, NamedTuple

from everstep.platforms.kubernetes.api_client import ApiReason, ChangeType
from everstep.platforms.kubernetes.demo.field_owners import Path
from everstep.platforms.kubernetes.demo.refusals import RefusedRequest
from everstep.platforms.kubernetes.kinds import Object

LOG_MAX: Final = 5_000


class ApiResource(NamedTuple):
    """Is a kind as the server serves it. ``schema``: of a custom kind; None: built in."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    scale: tuple[str, str, str] | None = None
    schema: Object | None = None

    @property
    def api_version(self) -> str:
        """Return what objects of the kind have as ``apiVersion``."""
        return f"{self.group}/{self.version}" if self.group else self.version


class LogEntry(NamedTuple):
    """Is one change. ``before``: the object as it was, for watches that select."""

    version: int
    plural: str
    type: ChangeType
    thing: Object
    before: Object | None


class ObjectStore:
    """Holds all objects. Use ``lock`` round what reads and then writes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.version = 0
        self.writes = 0
        self._things: dict[str, dict[tuple[str, str], Object]] = {}
        self._owners: dict[str, dict[str, set[Path]]] = {}
        self._log: list[LogEntry] = []
        self._forgotten = 0
        self.closed = False

    def __repr__(self) -> str:
        return f"<{sum(map(len, self._things.values()))} objects at {self.version}>"

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        """Return a copy; None: there is none."""
        with self.lock:
            return copy.deepcopy(self._things.get(plural, {}).get((namespace, name)))

    def all(self, plural: str, namespace: str = "") -> list[Object]:
        """Return copies of all objects of a kind, in the order of their names."""
        with self.lock:
            held = sorted(self._things.get(plural, {}).items())
            return [copy.deepcopy(thing) for (ns, _), thing in held if not namespace or ns == namespace]

    def owners(self, thing: Object) -> dict[str, set[Path]]:
        """Return who owns which fields of an object."""
        return self._owners.get(thing["metadata"]["uid"], {})

    def put(self, plural: str, thing: Object, owners: dict[str, set[Path]] | None = None) -> Object:
        """Store an object under the next version."""
        with self.lock:
            key = (thing["metadata"].get("namespace", ""), thing["metadata"]["name"])
            held = self._things.setdefault(plural, {})
            before = held.get(key)
            self.version += 1
            self.writes += 1
            thing = copy.deepcopy(thing)
            thing["metadata"]["resourceVersion"] = str(self.version)
            held[key] = thing
            if owners is not None:
                self._owners[thing["metadata"]["uid"]] = owners
            self._tell(plural, ChangeType.ADDED if before is None else ChangeType.MODIFIED, thing, before)
            return copy.deepcopy(thing)

    def drop(self, plural: str, thing: Object) -> None:
        """Remove an object."""
        with self.lock:
            key = (thing["metadata"].get("namespace", ""), thing["metadata"]["name"])
            before = self._things.get(plural, {}).pop(key, None)
            if before is None:
                return
            self._owners.pop(before["metadata"]["uid"], None)
            self.version += 1
            self.writes += 1
            gone = copy.deepcopy(before)
            gone["metadata"]["resourceVersion"] = str(self.version)
            self._tell(plural, ChangeType.DELETED, gone, before)

    def _tell(self, plural: str, what: ChangeType, thing: Object, before: Object | None) -> None:
        self._log.append(LogEntry(self.version, plural, what, copy.deepcopy(thing), before))
        if len(self._log) > LOG_MAX:
            self.forget(len(self._log) - LOG_MAX // 2)
        self._changed.notify_all()

    def forget(self, count: int = 1 << 30) -> None:
        """Forget the oldest changes: watches from before have to list again."""
        with self.lock:
            gone, self._log = self._log[:count], self._log[count:]
            if gone:
                self._forgotten = gone[-1].version

    def since(self, plural: str, version: int, wait_s: float) -> tuple[list[LogEntry], int]:
        """Return changes of a kind after ``version``, and the version up to which that is all; wait for some. Raises
        RefusedRequest: they are forgotten."""
        end = time.monotonic() + wait_s
        with self.lock:
            while True:
                if version < self._forgotten:
                    words = f"too old resource version: {version} ({self._forgotten})"
                    raise RefusedRequest(ApiReason.EXPIRED, words)
                found = []
                for entry in reversed(self._log):
                    if entry.version <= version:
                        break
                    if entry.plural == plural:
                        found.append(entry)
                left_s = end - time.monotonic()
                if found or left_s <= 0 or self.closed:
                    return found[::-1], self.version
                self._changed.wait(left_s)

    def close(self) -> None:
        """Wake all watches: they end."""
        with self.lock:
            self.closed = True
            self._changed.notify_all()
