"""Serves the API server in memory over HTTP, on this machine only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from everstep.bounds import MALFORMED
from everstep.platforms.kubernetes.api_client import ApiReason, ChangeType
from everstep.platforms.kubernetes.demo.api_server import ApiServer
from everstep.platforms.kubernetes.demo.object_store import ApiResource
from everstep.platforms.kubernetes.demo.refusals import RefusedRequest
from everstep.platforms.kubernetes.kinds import Object

BODY_MAX_BYTES: Final = 3 << 20
BOOKMARK_S: Final = 10.0
_MERGE: Final = "application/merge-patch+json"
_APPLY: Final = ("application/apply-patch+yaml", "application/apply-patch+json")
_decoder = msgspec.json.Decoder(dict[str, Any])

Rules = Sequence[Object]
"""Rules as a Role has them: apiGroups, resources, verbs."""


def allows(rules: Rules, group: str, resource: str, verb: str) -> bool:
    """Return whether rules give a right. ``resource``: with its part, such as ``pods/log``."""
    return any(
        {group, "*"} & set(rule.get("apiGroups") or ())
        and {resource, "*"} & set(rule.get("resources") or ())
        and {verb, "*"} & set(rule.get("verbs") or ())
        for rule in rules
    )


class ApiRequest:
    """Is one request, taken apart."""

    def __init__(self, method: str, path: str) -> None:
        parts = urlsplit(path)
        self.method = method
        self.query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.words = [unquote(word) for word in parts.path.strip("/").split("/")]
        self.group = self.version = self.plural = self.namespace = self.name = self.part = ""

    def __repr__(self) -> str:
        return f"<{self.method} {self.plural}/{self.name}>"

    def locate(self) -> None:
        """Find which object it is about. Raises RefusedRequest: it is about nothing that is served."""
        words = list(self.words)
        if words[:1] == ["api"] and len(words) > 2:
            self.version, words = words[1], words[2:]
        elif words[:1] == ["apis"] and len(words) > 3:
            self.group, self.version, words = words[1], words[2], words[3:]
        else:
            raise RefusedRequest(ApiReason.NOT_FOUND, "the server could not find the requested resource")
        if words[0] == "namespaces" and len(words) > 2:
            self.namespace, words = words[1], words[2:]
        self.plural, self.name, self.part = [*words, "", ""][:3]

    @property
    def verb(self) -> str:
        """Return the verb, as rules of rights have it."""
        if self.method == "GET":
            return "get" if self.name else "watch" if self.query.get("watch") in ("true", "1") else "list"
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(self.method, self.method)


class ApiHttp:
    """Serves until ``close``. ``rules``: token -> what its holder may do; None: anything, for everybody."""

    def __init__(
        self,
        server: ApiServer,
        rules: Mapping[str, Rules] | None = None,
        logs: Callable[[str, str], str] = lambda namespace, pod: "",
        port: int = 0,
    ) -> None:
        self.server, self._rules, self._logs = server, rules, logs
        self.seen: list[tuple[str, str, str]] = []  # verb, resource, name of each request

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # (an answer is written in two pieces)
            api = self

            def do_any(self) -> None:
                self.api.answer(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_any

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="api-server", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<API server at {self.url}>"

    def close(self) -> None:
        """Stop serving; watches end."""
        self.server.store.close()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    # ------------------------------------------------------------ one request

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        request = ApiRequest(handler.command, handler.path)
        try:
            body = self._body(handler)
            request.locate()
            self._check_rights(handler, request)
            if request.verb == "watch":
                self._watch(handler, request)
                return
            code, thing = self._do(handler, request, body)
        except RefusedRequest as refused:
            code, thing = refused.code, refused.status()
        except (BrokenPipeError, ConnectionResetError):
            return
        if isinstance(thing, str):
            _send(handler, code, thing.encode(), "text/plain")
        else:
            _send(handler, code, json.dumps(thing).encode(), "application/json")

    def _body(self, handler: BaseHTTPRequestHandler) -> Object:
        size = int(handler.headers.get("Content-Length") or 0)
        if size > BODY_MAX_BYTES:
            raise RefusedRequest(ApiReason.BAD_REQUEST, f"the body has {size} bytes; at most {BODY_MAX_BYTES}")
        raw = handler.rfile.read(size) if size else b""
        try:
            return _decoder.decode(raw) if raw else {}
        except MALFORMED as error:
            raise RefusedRequest(ApiReason.BAD_REQUEST, f"the body is no JSON object: {error}") from None

    def _check_rights(self, handler: BaseHTTPRequestHandler, request: ApiRequest) -> None:
        resource = f"{request.plural}/{request.part}" if request.part else request.plural
        self.seen.append((request.verb, resource, request.name))
        if self._rules is None or request.plural == "selfsubjectaccessreviews":
            return
        token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in self._rules:
            raise RefusedRequest(ApiReason.UNAUTHORIZED, "Unauthorized")
        if not allows(self._rules[token], request.group, resource, request.verb):
            words = f'{request.plural} is forbidden: cannot {request.verb} resource "{resource}"'
            raise RefusedRequest(ApiReason.FORBIDDEN, f'{words} in API group "{request.group}"')

    def _of(self, request: ApiRequest) -> ApiResource:
        found = self.server.resources.get((request.group, request.version, request.plural))
        if found is None:
            raise RefusedRequest(ApiReason.NOT_FOUND, "the server could not find the requested resource")
        return found

    def _do(self, handler: BaseHTTPRequestHandler, request: ApiRequest, body: Object) -> tuple[int, Object | str]:
        if request.plural == "selfsubjectaccessreviews":
            return 201, self._review(handler, body)
        of, server = self._of(request), self.server
        where = request.namespace, request.name
        manager, dry = request.query.get("fieldManager", "unknown"), request.query.get("dryRun") == "All"
        if request.method == "GET":
            return self._read(of, request)
        if request.part == "eviction" and request.method == "POST":
            server.evict(*where)
            return 201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        if request.part == "scale" and request.method in ("PUT", "PATCH"):
            return 200, server.scale(of, *where, body, manager)
        if request.part not in ("", "status") or (request.part == "status" and not of.status):
            raise RefusedRequest(ApiReason.NOT_FOUND, "the server could not find the requested resource")
        if request.method == "POST":
            return 201, server.create(of, request.namespace, body, manager, dry)
        if request.method == "PUT":
            return 200, server.update(of, *where, body, manager, request.part)
        if request.method == "DELETE":
            wanted = (body.get("preconditions") or {}).get("uid", "")
            grace = body.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
            return 200, server.delete(of, *where, wanted, None if grace is None else int(grace))
        kind = (handler.headers.get("Content-Type") or "").partition(";")[0]
        if kind in _APPLY:
            force = request.query.get("force") == "true"
            manager = request.query.get("fieldManager", "")
            return 200, server.apply(of, *where, body, manager, force, request.part, dry)
        if kind == _MERGE:
            return 200, server.merge(of, *where, body, manager, request.part)
        raise RefusedRequest(ApiReason.OTHER, f"the body of the request was in an unknown format: {kind}")

    def _review(self, handler: BaseHTTPRequestHandler, body: Object) -> Object:
        token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        asked = (body.get("spec") or {}).get("resourceAttributes") or {}
        rules = None if self._rules is None else self._rules.get(token, ())
        part = f"/{asked['subresource']}" if asked.get("subresource") else ""
        of = asked.get("group", ""), f"{asked.get('resource', '')}{part}", asked.get("verb", "")
        return {**body, "status": {"allowed": rules is None or allows(rules, *of)}}

    def _read(self, of: ApiResource, request: ApiRequest) -> tuple[int, Object | str]:
        where = request.namespace, request.name
        if request.part == "log":
            return 200, self._logs(*where)
        if request.part == "scale":
            return 200, self.server.scale(of, *where)
        if request.name:
            return 200, self.server._there(of, *where)
        with self.server.store.lock:
            things = [t for t in self.server.store.all(of.plural, request.namespace) if selected(t, request.query)]
            version = self.server.store.version
        start = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or 0) or len(things) + 1
        meta: Object = {"resourceVersion": str(version)}
        if start + limit < len(things):
            meta["continue"] = str(start + limit)
        items = things[start : start + limit]
        return 200, {"kind": f"{of.kind}List", "apiVersion": of.api_version, "metadata": meta, "items": items}

    # ------------------------------------------------------------ watches

    def _watch(self, handler: BaseHTTPRequestHandler, request: ApiRequest) -> None:
        of, store, query = self._of(request), self.server.store, request.query
        left_s = float(query.get("timeoutSeconds") or 300)
        text = query.get("resourceVersion") or ""
        first: list[tuple[ChangeType, Object]] = []
        with store.lock:
            version = int(text or 0)
            if not version:
                version = store.version
                first = [(ChangeType.ADDED, t) for t in store.all(of.plural, request.namespace) if selected(t, query)]
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for what, thing in first:
            _chunk(handler, {"type": what.value, "object": thing})
        while left_s > 0 and not store.closed:
            span_s = min(left_s, BOOKMARK_S)
            try:
                entries, now = store.since(of.plural, version, span_s)
            except RefusedRequest as refused:
                _chunk(handler, {"type": "ERROR", "object": refused.status()})
                break
            for entry in entries:
                if request.namespace and entry.thing["metadata"].get("namespace") != request.namespace:
                    continue
                was = entry.before is not None and selected(entry.before, query)
                is_now = entry.type is not ChangeType.DELETED and selected(entry.thing, query)
                if was or is_now:
                    what = ChangeType.DELETED if not is_now else ChangeType.MODIFIED if was else ChangeType.ADDED
                    _chunk(handler, {"type": what.value, "object": entry.thing})
            version = now
            if not entries:
                left_s -= span_s
                if query.get("allowWatchBookmarks") == "true":
                    meta = {"resourceVersion": str(now)}
                    mark = {"kind": of.kind, "apiVersion": of.api_version, "metadata": meta}
                    _chunk(handler, {"type": ChangeType.BOOKMARK.value, "object": mark})
        handler.wfile.write(b"0\r\n\r\n")


def _send(handler: BaseHTTPRequestHandler, code: int, body: bytes, kind: str) -> None:
    try:
        handler.send_response(code)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
    except (BrokenPipeError, ConnectionResetError):
        pass


def _chunk(handler: BaseHTTPRequestHandler, thing: Object) -> None:
    line = json.dumps(thing).encode() + b"\n"
    handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
    handler.wfile.flush()


def selected(thing: Object, query: Mapping[str, str]) -> bool:
    """Return whether label and field selectors choose an object. Raises RefusedRequest: a field that none has."""
    labels = thing["metadata"].get("labels") or {}
    for term in filter(None, (query.get("labelSelector") or "").split(",")):
        if not _label_term(term.strip(), labels):
            return False
    for term in filter(None, (query.get("fieldSelector") or "").split(",")):
        name, _, value = term.replace("==", "=").partition("!=" if "!=" in term else "=")
        if name not in ("metadata.name", "metadata.namespace", "spec.nodeName", "status.phase"):
            raise RefusedRequest(ApiReason.BAD_REQUEST, f"field label not supported: {name}")
        found: Any = thing
        for word in name.split("."):
            found = (found or {}).get(word)
        if ((found or "") == value) == ("!=" in term):
            return False
    return True


def _label_term(term: str, labels: Mapping[str, str]) -> bool:
    if "!=" in term:
        name, _, value = term.partition("!=")
        return labels.get(name.strip()) != value.strip()
    if "=" in term:
        name, _, value = term.replace("==", "=").partition("=")
        return labels.get(name.strip()) == value.strip()
    return term[1:] not in labels if term.startswith("!") else term in labels
