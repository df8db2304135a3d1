"""Reaches an API server through lightkube (extra ``k8s``). Nothing else imports it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import ConfigError, PlatformError
from everstep.platforms.kubernetes.api_client import (
    ApiReason,
    ApiServerError,
    ChangeType,
    WatchChange,
    reason_of,
)
from everstep.platforms.kubernetes.kinds import GROUP, MANAGER, VERSION, Kind, Object, name_of

try:
    import httpx2
    import lightkube
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ApiError
    from lightkube.core.exceptions import ConfigError as KubeConfigError
    from lightkube.generic_resource import create_global_resource, create_namespaced_resource
    from lightkube.types import PatchType
except ImportError:
    raise PlatformError("Kubernetes needs a library: pip install 'everstep[k8s]'") from None

_PLURALS: Final = {
    Kind.JOB: (GROUP, VERSION, "elasticjobs"),
    Kind.SCALE_OUT: (GROUP, VERSION, "scaleouts"),
    Kind.SCALE_IN: (GROUP, VERSION, "scaleins"),
    Kind.POD: ("", "v1", "pods"),
    Kind.NODE: ("", "v1", "nodes"),
    Kind.SERVICE: ("", "v1", "services"),
    Kind.SECRET: ("", "v1", "secrets"),
    Kind.VOLUME_CLAIM: ("", "v1", "persistentvolumeclaims"),
    Kind.BUDGET: ("policy", "v1", "poddisruptionbudgets"),
    Kind.LEASE: ("coordination.k8s.io", "v1", "leases"),
    Kind.EVENT: ("", "v1", "events"),
    Kind.QUOTA: ("", "v1", "resourcequotas"),
    Kind.VOLCANO_GROUP: ("scheduling.volcano.sh", "v1beta1", "podgroups"),
    Kind.PLUGINS_GROUP: ("scheduling.x-k8s.io", "v1alpha1", "podgroups"),
    Kind.NATIVE_GROUP: ("scheduling.k8s.io", "v1alpha2", "podgroups"),
}
_REQUEST_S: Final = 30.0


def _resource(kind: Kind) -> Any:
    group, version, plural = _PLURALS[kind]
    name = kind.value.partition(".")[0]
    if kind is Kind.NODE:
        return create_global_resource(group, version, name, plural)
    return create_namespaced_resource(group, version, name, plural)


_RESOURCES: Final = {kind: _resource(kind) for kind in Kind}
"""lightkube takes a kind once in a process."""


class LightkubeClient:
    """Is an API server. Calls raise ApiServerError. Safe to use from several threads."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._resources = _RESOURCES
        self._closed = False

    def __repr__(self) -> str:
        return f"<{self._client.config.cluster.server}>"

    @classmethod
    def connect(cls, context: str = "", url: str = "", token: str = "") -> LightkubeClient:
        """Return a client for a context of the user's kubeconfig, for ``url``, or for the cluster of this pod. Raises
        ConfigError."""
        try:
            if url:
                config = KubeConfig.from_server(url).get()
                if token:
                    config = KubeConfig.from_dict(_with_token(url, token)).get()
            else:
                config = KubeConfig.from_env().get(context or None)
        except (KubeConfigError, OSError) as error:
            raise ConfigError(f"no cluster to talk to: {error}; set KUBECONFIG, or name a --context") from None
        if config is None:
            raise ConfigError(
                f"--context {context!r}: is not in the kubeconfig; kubectl config get-contexts lists them"
            )
        timeout = httpx2.Timeout(_REQUEST_S)
        return cls(lightkube.Client(config=config, field_manager=MANAGER, timeout=timeout, trust_env=True))

    @property
    def _http(self) -> Any:
        """The connections of lightkube: it has no call for preconditions, rights and bookmarks."""
        return self._client._client._client

    @property
    def namespace(self) -> str:
        """Return the namespace of the context."""
        return str(self._client.namespace or "default")

    def list_all(self, kind: Kind, namespace: str) -> tuple[list[Object], str]:
        return self._ask(f"list {kind.value}", lambda: self._listed(kind, namespace))  # type: ignore[no-any-return]

    def _listed(self, kind: Kind, namespace: str) -> tuple[list[Object], str]:
        things = self._client.list(self._resources[kind], namespace=namespace or None)
        items = [{"kind": kind.value, **plain(thing)} for thing in things]
        return items, str(things.resourceVersion)

    def watch(self, kind: Kind, namespace: str, version: str, for_s: int) -> Iterator[WatchChange]:
        """``for_s``: the server ends the watch then."""
        what = f"watch {kind.value}"
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query["timeoutSeconds"] = str(for_s)
        timeout = httpx2.Timeout(_REQUEST_S, read=for_s + _REQUEST_S)
        try:
            with self._http.stream("GET", _path(kind, namespace), params=query, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise ApiError(request=answer.request, response=answer)
                for line in answer.iter_lines():
                    if line:
                        yield _change(what, line)
        except RuntimeError:
            if not self._closed:
                raise
            raise ApiServerError(what, 0, ApiReason.UNREACHABLE, "the client was closed") from None
        except (ApiError, httpx2.HTTPError) as error:
            raise _error(what, error) from None

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        what = f"get {kind.value} {name}"
        return plain(
            self._ask(what, lambda: self._client.get(self._resources[kind], name, namespace=namespace or None))
        )

    def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        made = self._resources[kind].from_dict(body)
        what = f"create {kind.value} {name_of(body)}"
        return plain(self._ask(what, lambda: self._client.create(made, namespace=namespace or None)))

    def apply(self, kind: Kind, namespace: str, body: Object, force: bool = False, dry: bool = False) -> Object:
        made = self._resources[kind].from_dict(body)
        what, where = f"apply {kind.value} {name_of(body)}", namespace or None
        return plain(self._ask(what, lambda: self._client.apply(made, namespace=where, force=force, dry_run=dry)))

    def apply_status(self, kind: Kind, namespace: str, body: Object) -> Object:
        made = self._resources[kind].Status.from_dict(body)
        what = f"status of {kind.value} {name_of(body)}"
        name = name_of(body)
        done = self._ask(what, lambda: self._client.apply(made, name=name, namespace=namespace or None, force=True))
        return plain(done)

    def patch(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        what = f"patch {kind.value} {name}"
        of = self._resources[kind]
        merge = PatchType.MERGE
        done = self._ask(
            what, lambda: self._client.patch(of, name, body, namespace=namespace or None, patch_type=merge)
        )
        return plain(done)

    def delete(self, kind: Kind, namespace: str, name: str, uid: str = "", grace_s: int | None = None) -> None:
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        path = f"{_path(kind, namespace)}/{name}"
        self._ask(f"delete {kind.value} {name}", lambda: self._raw("DELETE", path, options))

    def may(self, verb: str, kind: Kind, namespace: str) -> bool:
        group, _, plural = _PLURALS[kind]
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": plural}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        body = {**review, "spec": {"resourceAttributes": asked}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        news = self._ask(f"rights on {plural}", lambda: self._raw("POST", path, body).json())
        return bool((news.get("status") or {}).get("allowed"))

    def logs(self, namespace: str, pod: str, tail_lines: int) -> str:
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log?tailLines={tail_lines}"
        return str(self._ask(f"logs of {pod}", lambda: self._raw("GET", path, None).text))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.close()

    def _raw(self, method: str, path: str, body: Object | None) -> Any:
        answer = self._http.request(method, path, json=body)
        if answer.status_code >= 400:
            raise ApiError(request=answer.request, response=answer)
        return answer

    def _ask(self, what: str, call: Any) -> Any:
        try:
            return call()
        except (ApiError, httpx2.HTTPError) as error:
            raise _error(what, error) from None


def _path(kind: Kind, namespace: str) -> str:
    group, version, plural = _PLURALS[kind]
    base = f"/apis/{group}/{version}" if group else f"/api/{version}"
    return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"


class _WatchLine(msgspec.Struct):
    type: str
    object: dict[str, Any]


_line_decoder = msgspec.json.Decoder(_WatchLine)


def _change(what: str, line: str) -> WatchChange:
    """Return what one line of a watch tells. Raises ApiServerError: the watch is over, or the line is garbage."""
    try:
        news = _line_decoder.decode(line)
    except MALFORMED as error:
        raise ApiServerError(what, 0, ApiReason.OTHER, f"a line that is no change: {error}") from None
    if news.type not in tuple(ChangeType):
        code = int(news.object.get("code") or 0)
        reason = reason_of(code, str(news.object.get("reason") or ""))
        raise ApiServerError(what, code, reason, str(news.object.get("message") or news.type))
    return WatchChange(ChangeType(news.type), news.object)


def _with_token(url: str, token: str) -> Object:
    return {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def _error(what: str, error: Exception) -> ApiServerError:
    if isinstance(error, ApiError) and error.status is not None:
        status = error.status
        details = getattr(status, "details", None)
        causes = tuple(str(c.reason) for c in (details.causes if details is not None else None) or () if c.reason)
        code = int(status.code or 0)
        return ApiServerError(what, code, reason_of(code, str(status.reason or "")), str(status.message), causes)
    if isinstance(error, httpx2.HTTPStatusError):
        code = error.response.status_code
        return ApiServerError(what, code, reason_of(code, ""), f"HTTP status {code}")
    late = isinstance(error, httpx2.TimeoutException)
    words = str(error) or type(error).__name__
    return ApiServerError(what, 0, ApiReason.TIMEOUT if late else ApiReason.UNREACHABLE, words)


def plain(thing: Any) -> Object:
    """Return an object of lightkube as plain values."""
    found: Object = _plain(thing.to_dict() if hasattr(thing, "to_dict") else dict(thing))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def kubeconfig_for(url: str, path: Path, namespace: str) -> None:
    """Write a kubeconfig for an API server without users."""
    import yaml

    config = _with_token(url, "demo")
    config |= {"apiVersion": "v1", "kind": "Config"}
    config["contexts"] = [{"name": "demo", "context": {"cluster": "c", "user": "u", "namespace": namespace}}]
    config["current-context"] = "demo"
    path.write_text(yaml.safe_dump(config))
