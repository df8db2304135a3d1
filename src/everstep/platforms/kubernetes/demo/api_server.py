"""Is an API server in memory: what a real one refuses, it refuses, and what it fills in, it fills in.

Left out, and said so in docs/kubernetes.md: authentication but by token, admission webhooks, strategic merge patches,
JSON patches, most built-in validation, all kinds that the operator does not use.
"""

from __future__ import annotations

import base64
import copy
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from everstep.platforms.kubernetes.api_client import ApiReason, ChangeType
from everstep.platforms.kubernetes.demo import field_owners, schemas
from everstep.platforms.kubernetes.demo.admission import admit_pod, default_pod, wrong_pod
from everstep.platforms.kubernetes.demo.object_store import ApiResource, ObjectStore
from everstep.platforms.kubernetes.demo.refusals import RefusedRequest, invalid, not_found
from everstep.platforms.kubernetes.kinds import Object
from everstep.platforms.kubernetes.pods import stamp_of

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
CRDS: Final = "customresourcedefinitions"
BUILT_IN: Final = (
    ApiResource("", "v1", "pods", "Pod", status=True),
    ApiResource("", "v1", "nodes", "Node", namespaced=False, status=True),
    ApiResource("", "v1", "namespaces", "Namespace", namespaced=False, status=True),
    ApiResource("", "v1", "services", "Service", status=True),
    ApiResource("", "v1", "secrets", "Secret"),
    ApiResource("", "v1", "events", "Event"),
    ApiResource("", "v1", "resourcequotas", "ResourceQuota", status=True),
    ApiResource("", "v1", "serviceaccounts", "ServiceAccount"),
    ApiResource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", status=True),
    ApiResource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", status=True),
    ApiResource("coordination.k8s.io", "v1", "leases", "Lease"),
    ApiResource("apps", "v1", "deployments", "Deployment", status=True),
    ApiResource("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    ApiResource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    ApiResource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False),
    ApiResource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    ApiResource("apiextensions.k8s.io", "v1", CRDS, "CustomResourceDefinition", namespaced=False, status=True),
)


class ApiServer:
    """Answers requests about objects, one at a time."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.store, self._now = ObjectStore(), now
        self.resources = {(r.group, r.version, r.plural): r for r in BUILT_IN}
        for name in ("default", "kube-system"):
            self.create(self.of("namespaces"), "", {"metadata": {"name": name}})

    def __repr__(self) -> str:
        return f"<API server in memory: {self.store!r}>"

    def of(self, plural: str) -> ApiResource:
        """Return a kind that is served, by its plural."""
        return next(r for r in self.resources.values() if r.plural == plural)

    # ------------------------------------------------------------ writing

    def create(
        self, of: ApiResource, namespace: str, body: Object, manager: str = "unknown", dry: bool = False
    ) -> Object:
        """Create an object. Raises RefusedRequest."""
        with self.store.lock:
            thing = self._shaped(of, namespace, body)
            meta = thing["metadata"]
            if self.store.get(of.plural, namespace, meta["name"]) is not None:
                words = f'{of.plural} "{meta["name"]}" already exists'
                raise RefusedRequest(ApiReason.ALREADY_EXISTS, words)
            if meta.get("resourceVersion"):
                raise RefusedRequest(
                    ApiReason.BAD_REQUEST, "resourceVersion should not be set on objects to be created"
                )
            self._need_namespace(of, namespace)
            for field in ("deletionTimestamp", "managedFields", "generation"):
                meta.pop(field, None)
            meta["uid"] = str(self._uid())
            meta["creationTimestamp"] = stamp_of(self._now())
            meta["generation"] = 1
            if of.status:
                thing.pop("status", None)
            thing = self._checked(of, thing, None)
            if of.plural == "pods":
                admit_pod(thing, self.store)
            if of.plural == CRDS:
                self._serve(thing)
            if dry:
                return thing
            owners = field_owners.wrote({}, thing, of.schema, {}, manager)
            return self.store.put(of.plural, thing, owners)

    @staticmethod
    def _uid() -> str:
        raw = secrets.token_hex(16)
        return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))

    def update(
        self, of: ApiResource, namespace: str, name: str, body: Object, manager: str = "unknown", part: str = ""
    ) -> Object:
        """Replace an object, or its ``part`` (status). Raises RefusedRequest."""
        with self.store.lock:
            old = self._there(of, namespace, name)
            version = (body.get("metadata") or {}).get("resourceVersion")
            if not version and of.schema is not None:
                raise invalid(of.kind, name, ("metadata.resourceVersion", "Invalid value: 0: must be specified"))
            return self._store(of, old, self._shaped(of, namespace, body), version, manager, part, None)

    def merge(
        self, of: ApiResource, namespace: str, name: str, patch: Object, manager: str = "unknown", part: str = ""
    ) -> Object:
        """Merge a patch into an object (RFC 7386). Raises RefusedRequest."""
        with self.store.lock:
            old = self._there(of, namespace, name)
            version = (patch.get("metadata") or {}).get("resourceVersion")
            return self._store(of, old, _merged_object(old, patch), version, manager, part, None)

    def apply(
        self,
        of: ApiResource,
        namespace: str,
        name: str,
        body: Object,
        manager: str,
        force: bool = False,
        part: str = "",
        dry: bool = False,
    ) -> Object:
        """Apply what a manager wants of an object; ``dry``: say what that would give. Raises RefusedRequest."""
        with self.store.lock:
            if not manager:
                raise RefusedRequest(
                    ApiReason.BAD_REQUEST, "PatchOptions.meta.k8s.io is invalid: fieldManager: Required"
                )
            given = copy.deepcopy(body)
            given.get("metadata", {}).pop("managedFields", None)
            if of.status:
                given = {k: v for k, v in given.items() if k != "status"} if not part else given
            given = schemas.pruned(given, of.schema) if of.schema else given
            old = self.store.get(of.plural, namespace, name)
            if old is None and part:
                raise not_found(of.plural, name)
            owners = self.store.owners(old) if old is not None else {}
            now, owned = field_owners.apply(old, given, of.schema, owners, manager, force)
            if old is None:
                made = self.create(
                    of, namespace, {**now, "metadata": {**now.get("metadata", {}), "name": name}}, manager, dry
                )
                return made
            version = (body.get("metadata") or {}).get("resourceVersion")
            return self._store(of, old, now, version, manager, part, owned, dry)

    def _store(
        self,
        of: ApiResource,
        old: Object,
        new: Object,
        version: str | None,
        manager: str,
        part: str,
        owned: dict[str, set[field_owners.Path]] | None,
        dry: bool = False,
    ) -> Object:
        """Write an object that is there: the version must be its own, status and the rest are written apart."""
        name = old["metadata"]["name"]
        if version and version != old["metadata"]["resourceVersion"]:
            words = f'Operation cannot be fulfilled on {of.plural} "{name}": the object has been modified'
            raise RefusedRequest(ApiReason.CONFLICT, words)
        thing = copy.deepcopy(new)
        thing["metadata"] = {**thing.get("metadata", {}), **{k: old["metadata"].get(k) for k in _FIXED}}
        thing["metadata"] = {k: v for k, v in thing["metadata"].items() if v is not None}
        if part == "status":
            thing = {**copy.deepcopy(old), "status": thing.get("status", {})}
        elif of.status:
            thing.pop("status", None)
            if "status" in old:
                thing["status"] = copy.deepcopy(old["status"])
        thing = self._checked(of, thing, old)
        if of.plural == "pods" and part != "status" and _frozen(thing) != _frozen(old):
            words = "Forbidden: pod updates may not change fields other than image, tolerations and grace periods"
            raise invalid(of.kind, name, ("spec", words))
        if thing == old:
            return old
        if dry:
            return thing
        if part != "status" and {**thing, "metadata": 0, "status": 0} != {**old, "metadata": 0, "status": 0}:
            thing["metadata"]["generation"] = int(old["metadata"].get("generation", 0)) + 1
        owners = owned or field_owners.wrote(old, thing, of.schema, self.store.owners(old), manager)
        stored = self.store.put(of.plural, thing, owners)
        self._finish(of, stored)
        return stored

    # ------------------------------------------------------------ deleting

    def delete(self, of: ApiResource, namespace: str, name: str, uid: str = "", grace_s: int | None = None) -> Object:
        """Delete an object, or have it leave. Raises RefusedRequest."""
        with self.store.lock:
            old = self._there(of, namespace, name)
            if uid and uid != old["metadata"]["uid"]:
                words = f"the UID in the precondition ({uid}) does not match the UID in record"
                raise RefusedRequest(ApiReason.CONFLICT, words)
            if of.plural == "pods":
                own = old["spec"].get("terminationGracePeriodSeconds", 30)
                scheduled = bool(old["spec"].get("nodeName")) and old.get("status", {}).get("phase") in (
                    None,
                    "Pending",
                    "Running",
                )
                seconds = (own if grace_s is None else grace_s) if scheduled else 0
                if seconds > 0:
                    if not old["metadata"].get("deletionTimestamp"):
                        old["metadata"]["deletionTimestamp"] = stamp_of(self._now() + seconds)
                        old["metadata"]["deletionGracePeriodSeconds"] = seconds
                        return self.store.put(of.plural, old)
                    return old
            if old["metadata"].get("finalizers"):
                old["metadata"].setdefault("deletionTimestamp", stamp_of(self._now()))
                return self.store.put(of.plural, old)
            self._drop(of, old)
            return old

    def _finish(self, of: ApiResource, thing: Object) -> None:
        """Remove an object whose last finalizer is gone."""
        meta = thing["metadata"]
        if of.plural != "pods" and meta.get("deletionTimestamp") and not meta.get("finalizers"):
            self._drop(of, thing)

    def _drop(self, of: ApiResource, thing: Object) -> None:
        self.store.drop(of.plural, thing)
        if of.plural == CRDS:
            names = thing["spec"]["names"]
            for key in [k for k, r in self.resources.items() if r.plural == names["plural"]]:
                for each in self.store.all(names["plural"]):
                    self.store.drop(names["plural"], each)
                del self.resources[key]
        self._collect(thing["metadata"]["uid"])

    def _collect(self, uid: str) -> None:
        """Delete what an object owned that is gone."""
        for resource in list(self.resources.values()):
            for each in self.store.all(resource.plural):
                owners = each["metadata"].get("ownerReferences") or []
                if any(owner["uid"] == uid for owner in owners) and len(owners) == 1:
                    self.delete(resource, each["metadata"].get("namespace", ""), each["metadata"]["name"])

    def evict(self, namespace: str, name: str) -> None:
        """Take a pod off its node, unless a budget forbids it. Raises RefusedRequest."""
        with self.store.lock:
            pods = self.of("pods")
            pod = self._there(pods, namespace, name)
            for budget in self.store.all("poddisruptionbudgets", namespace):
                match = budget["spec"]["selector"].get("matchLabels", {})
                of = [p for p in self.store.all("pods", namespace) if _has(p, match)]
                if not _has(pod, match):
                    continue
                broken = sum(not _healthy(p) for p in of)
                if broken + (1 if _healthy(pod) else 0) > int(budget["spec"].get("maxUnavailable", 0)):
                    words = "Cannot evict pod as it would violate the pod's disruption budget."
                    cause = ("DisruptionBudget", f"The disruption budget {budget['metadata']['name']} needs its pods")
                    raise RefusedRequest(ApiReason.TOO_MANY, words, (cause,))
            self.disrupt(pod, "EvictionByEvictionAPI")
            self.delete(pods, namespace, name)

    def disrupt(self, pod: Object, reason: str) -> None:
        """Note why the cluster takes a pod."""
        status = pod.setdefault("status", {})
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
        status["conditions"] = [*(status.get("conditions") or []), condition]
        self.store.put("pods", pod)

    # ------------------------------------------------------------ the scale subresource

    def scale(
        self, of: ApiResource, namespace: str, name: str, body: Object | None = None, manager: str = "scale"
    ) -> Object:
        """Return the Scale of an object, after writing it if a body is given. Raises RefusedRequest."""
        with self.store.lock:
            thing = self._there(of, namespace, name)
            if of.scale is None:
                raise not_found(of.plural, f"{name}/scale")
            wanted, has, selector = of.scale
            if body is not None:
                count = (body.get("spec") or {}).get("replicas")
                version = (body.get("metadata") or {}).get("resourceVersion")
                new = copy.deepcopy(thing)
                _put(new, wanted, count)
                thing = self._store(of, thing, new, version, manager, "", None)
            meta = {k: thing["metadata"].get(k) for k in ("name", "namespace", "uid", "resourceVersion")}
            return {
                "apiVersion": "autoscaling/v1",
                "kind": "Scale",
                "metadata": meta,
                "spec": {"replicas": _at(thing, wanted) or 0},
                "status": {"replicas": _at(thing, has) or 0, "selector": _at(thing, selector) or ""},
            }

    # ------------------------------------------------------------ shape

    def _there(self, of: ApiResource, namespace: str, name: str) -> Object:
        found = self.store.get(of.plural, namespace, name)
        if found is None:
            raise not_found(f"{of.plural}.{of.group}" if of.group else of.plural, name)
        return found

    def _shaped(self, of: ApiResource, namespace: str, body: Object) -> Object:
        thing = copy.deepcopy(body)
        if (
            thing.setdefault("kind", of.kind) != of.kind
            or thing.setdefault("apiVersion", of.api_version) != of.api_version
        ):
            raise RefusedRequest(ApiReason.BAD_REQUEST, f"the object is no {of.api_version} {of.kind}")
        meta = thing.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = f"{meta['generateName']}{secrets.token_hex(3)[:5]}"
        name = str(meta.get("name", ""))
        if not _NAME.fullmatch(name) or (of.plural in ("pods", "services") and len(name) > 253):
            raise invalid(of.kind, name, ("metadata.name", f"Invalid value: {name!r}: a lowercase RFC 1123 subdomain"))
        if of.namespaced and meta.setdefault("namespace", namespace) != namespace:
            words = "the namespace of the provided object does not match the namespace sent on the request"
            raise RefusedRequest(ApiReason.BAD_REQUEST, words)
        return thing

    def _checked(self, of: ApiResource, thing: Object, old: Object | None) -> Object:
        if of.plural == "secrets" and thing.get("stringData"):
            data = {k: base64.b64encode(v.encode()).decode() for k, v in thing.pop("stringData").items()}
            thing["data"] = {**(thing.get("data") or {}), **data}
        if of.plural == "pods":
            thing = default_pod(thing)
            if wrong := wrong_pod(thing):
                raise invalid(of.kind, thing["metadata"]["name"], *wrong)
        if of.schema is None:
            return thing
        thing = schemas.defaulted(schemas.pruned(thing, of.schema), of.schema)
        if wrong := list(schemas.problems(thing, of.schema, old)):
            raise invalid(of.kind, thing["metadata"]["name"], *wrong)
        return thing

    def _need_namespace(self, of: ApiResource, namespace: str) -> None:
        if not of.namespaced:
            return
        found = self.store.get("namespaces", "", namespace)
        if found is None:
            raise not_found("namespaces", namespace)
        if found["metadata"].get("deletionTimestamp"):
            words = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise RefusedRequest(ApiReason.FORBIDDEN, words, (("NamespaceTerminating", words),))

    def _serve(self, definition: Object) -> None:
        spec, name = definition["spec"], definition["metadata"]["name"]
        if name != f"{spec['names']['plural']}.{spec['group']}":
            raise invalid("CustomResourceDefinition", name, ("metadata.name", "must be spec.names.plural+.+spec.group"))
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            if wrong := list(schemas.unusable(schema)):
                raise invalid("CustomResourceDefinition", name, *(("spec.validation", words) for words in wrong))
            parts = version.get("subresources") or {}
            scale = parts.get("scale")
            paths = (
                (scale["specReplicasPath"], scale["statusReplicasPath"], scale["labelSelectorPath"]) if scale else None
            )
            of = ApiResource(
                spec["group"],
                version["name"],
                spec["names"]["plural"],
                spec["names"]["kind"],
                spec["scope"] == "Namespaced",
                "status" in parts,
                paths,
                with_metadata(schema),
            )
            self.resources[of.group, of.version, of.plural] = of


_FIXED: Final = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")


def with_metadata(schema: Object) -> Object:
    """Return a schema that leaves metadata alone: the server itself knows it, and kinds say nothing of it."""
    keep = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {**schema, "properties": {**schema["properties"], "metadata": keep}}


def _merged_object(old: Object, patch: Object) -> Object:
    merged: Object = _merged(old, patch)
    return merged


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    out = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = _merged(out.get(name), value)
    return out


def _frozen(pod: Object) -> Object:
    spec: Object = copy.deepcopy(pod["spec"])
    for field in (
        "tolerations",
        "terminationGracePeriodSeconds",
        "activeDeadlineSeconds",
        "schedulingGates",
        "nodeName",
    ):
        spec.pop(field, None)
    return spec


def _healthy(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return bool(ready and not pod["metadata"].get("deletionTimestamp"))


def _has(thing: Object, labels: dict[str, str]) -> bool:
    own = thing["metadata"].get("labels") or {}
    return all(own.get(k) == v for k, v in labels.items())


def _at(thing: Any, path: str) -> Any:
    for name in path.strip(".").split("."):
        thing = thing.get(name) if isinstance(thing, dict) else None
    return thing


def _put(thing: Any, path: str, value: Any) -> None:
    *names, last = path.strip(".").split(".")
    for name in names:
        thing = thing.setdefault(name, {})
    thing[last] = value


__all__ = ["BUILT_IN", "CRDS", "ApiServer", "ChangeType"]
