"""Defines the port to an API server, its errors by kind, and the cache of listed objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from everstep.errors import PlatformError
from everstep.platforms.kubernetes.kinds import Kind, Object, name_of


class ApiReason(StrEnum):
    """Says why the API server refused a request: its ``status.reason``."""

    UNAUTHORIZED = "Unauthorized"
    FORBIDDEN = "Forbidden"
    NOT_FOUND = "NotFound"
    ALREADY_EXISTS = "AlreadyExists"
    CONFLICT = "Conflict"
    INVALID = "Invalid"
    BAD_REQUEST = "BadRequest"
    EXPIRED = "Expired"
    GONE = "Gone"
    TOO_MANY = "TooManyRequests"
    TIMEOUT = "Timeout"
    UNREACHABLE = "Unreachable"
    OTHER = "Other"


_BY_CODE: Mapping[int, ApiReason] = {
    400: ApiReason.BAD_REQUEST,
    401: ApiReason.UNAUTHORIZED,
    403: ApiReason.FORBIDDEN,
    404: ApiReason.NOT_FOUND,
    409: ApiReason.CONFLICT,
    410: ApiReason.GONE,
    422: ApiReason.INVALID,
    429: ApiReason.TOO_MANY,
}


def reason_of(code: int, reason: str) -> ApiReason:
    """Return the kind of a refusal, by its reason, or else by its status code."""
    if reason in tuple(ApiReason):
        return ApiReason(reason)
    return _BY_CODE.get(code, ApiReason.OTHER)


class Cause(StrEnum):
    """Is a cause that the API server gives with a refusal, in ``status.details.causes``."""

    NAMESPACE_TERMINATING = "NamespaceTerminating"


class ApiServerError(PlatformError):
    """Says that the API server refused a request. ``reason`` is what code decides by, the text is for people."""

    def __init__(self, what: str, code: int, reason: ApiReason, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(f"{what}: {message} ({reason.value}, {code})" if code else f"{what}: {message}")
        self.code, self.reason, self.causes = code, reason, causes

    @property
    def passing(self) -> bool:
        """Return whether the same request may succeed later by itself."""
        return self.code >= 500 or self.reason in (ApiReason.TOO_MANY, ApiReason.TIMEOUT, ApiReason.UNREACHABLE)


class ChangeType(StrEnum):
    """Says what became of a watched object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


class WatchChange(NamedTuple):
    """Is what a watch tells."""

    type: ChangeType
    thing: Object


class ClusterClient(Protocol):
    """Is an API server, as the operator uses it. Each call raises ApiServerError. ``namespace`` "": of kinds that have
    none."""

    def list_all(self, kind: Kind, namespace: str) -> tuple[list[Object], str]:
        """Return all objects of a kind, and the version of that list."""
        ...

    def watch(self, kind: Kind, namespace: str, version: str, for_s: int) -> Iterator[WatchChange]:
        """Tell what has changed since ``version``, for so long at most."""
        ...

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return an object."""
        ...

    def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Create an object; return it as it is stored."""
        ...

    def apply(self, kind: Kind, namespace: str, body: Object, force: bool = False, dry: bool = False) -> Object:
        """Write the fields of ``body`` as this program's own (server-side apply). ``dry``: only say what would be."""
        ...

    def apply_status(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Write the status. A ``resourceVersion`` in it has to be the object's."""
        ...

    def patch(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        """Merge ``body`` into an object. A ``resourceVersion`` in it has to be the object's."""
        ...

    def delete(self, kind: Kind, namespace: str, name: str, uid: str = "", grace_s: int | None = None) -> None:
        """Delete an object; if ``uid`` is given, only the one with that uid."""
        ...

    def may(self, verb: str, kind: Kind, namespace: str) -> bool:
        """Return whether this program has a right."""
        ...

    def logs(self, namespace: str, pod: str, tail_lines: int) -> str:
        """Return the end of what a pod has printed."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class Cache:
    """Holds the newest known state of all objects of one kind. What was created is in it at once: between its creation
    and the watch's word of it, it must not be made again."""

    def __init__(self) -> None:
        self._things: dict[tuple[str, str], Object] = {}
        self._version = 0

    def __repr__(self) -> str:
        return f"<{len(self._things)} objects at {self._version}>"

    @property
    def version(self) -> str:
        """Return the version up to which the watch has told everything."""
        return str(self._version)

    def replace(self, things: list[Object], version: str) -> None:
        """Take a list."""
        self._things = {_key(thing): thing for thing in things}
        self._version = int(version)

    def tell(self, change: WatchChange) -> None:
        """Take what the watch tells next."""
        thing, version = change.thing, int(change.thing["metadata"]["resourceVersion"])
        if change.type is ChangeType.DELETED:
            held = self._things.get(_key(thing))
            if held is not None and held["metadata"].get("uid") == thing["metadata"].get("uid"):
                del self._things[_key(thing)]
        elif change.type is not ChangeType.BOOKMARK:
            held = self._things.get(_key(thing))
            if held is None or int(held["metadata"]["resourceVersion"]) <= version:
                self._things[_key(thing)] = thing
        self._version = max(self._version, version)

    def made(self, thing: Object) -> None:
        """Take an object as the server answered it. The watch may have told all about it, and its end, already."""
        if int(thing["metadata"]["resourceVersion"]) > self._version:
            self.tell_newer(thing)

    def tell_newer(self, thing: Object) -> None:
        """Take an object if it is newer than what is held."""
        held = self._things.get(_key(thing))
        if held is None or int(held["metadata"]["resourceVersion"]) < int(thing["metadata"]["resourceVersion"]):
            self._things[_key(thing)] = thing

    def all(self) -> list[Object]:
        """Return everything."""
        return list(self._things.values())

    def get(self, namespace: str, name: str) -> Object | None:
        """Return one object; None: there is none."""
        return self._things.get((namespace, name))


def _key(thing: Object) -> tuple[str, str]:
    return str(thing["metadata"].get("namespace", "")), name_of(thing)
