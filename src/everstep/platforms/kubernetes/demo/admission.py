"""Decides whether a pod may be created: its shape, the namespace's quota and its level of pod security."""

from __future__ import annotations

import copy
from typing import Any

from everstep.platforms.kubernetes.api_client import ApiReason
from everstep.platforms.kubernetes.demo.object_store import ObjectStore
from everstep.platforms.kubernetes.demo.refusals import Problem, RefusedRequest
from everstep.platforms.kubernetes.kinds import Object

_RESTARTS = ("Always", "OnFailure", "Never")


def default_pod(pod: Object) -> Object:
    """Return the pod with what the server fills in."""
    pod = copy.deepcopy(pod)
    spec = pod.setdefault("spec", {})
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("schedulerName", "default-scheduler")
    held = {t.get("key") for t in spec.get("tolerations") or []}
    for state in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{state}"
        if key not in held:
            more = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            spec["tolerations"] = [*(spec.get("tolerations") or []), more]
    pod.setdefault("status", {"phase": "Pending"})
    return pod


def wrong_pod(pod: Object) -> list[Problem]:
    """Return what a server refuses in a pod's shape."""
    spec, out = pod["spec"], []
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers:
        return [("spec.containers", "Required value")]
    volumes = {v.get("name") for v in spec.get("volumes") or []}
    if len(volumes) != len(spec.get("volumes") or []):
        out.append(("spec.volumes", "Duplicate value"))
    for n, container in enumerate(containers):
        at = f"spec.containers[{n}]"
        out += [(f"{at}.{field}", "Required value") for field in ("name", "image") if not container.get(field)]
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") not in volumes:
                out.append((f"{at}.volumeMounts", f'Not found: "{mount.get("name")}"'))
        for each in container.get("env") or []:
            if "value" in each and not isinstance(each["value"], str):
                out.append((f"{at}.env", f"Invalid value: {each['value']!r}: must be of type string"))
    if spec["restartPolicy"] not in _RESTARTS:
        out.append(("spec.restartPolicy", f'Unsupported value: "{spec["restartPolicy"]}"'))
    for field in ("hostname", "subdomain"):
        if len(spec.get(field) or "") > 63 or "." in (spec.get(field) or ""):
            out.append((f"spec.{field}", f"Invalid value: {spec[field]!r}: a lowercase RFC 1123 label"))
    return out


def admit_pod(pod: Object, store: ObjectStore) -> None:
    """Raise RefusedRequest if the namespace may not have this pod."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    labels = (store.get("namespaces", "", namespace) or {"metadata": {}})["metadata"].get("labels") or {}
    if labels.get("pod-security.kubernetes.io/enforce") == "restricted" and (wrong := _unsafe(pod["spec"])):
        words = f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {", ".join(wrong)}'
        raise RefusedRequest(ApiReason.FORBIDDEN, words)
    for quota in store.all("resourcequotas", namespace):
        most = (quota["spec"].get("hard") or {}).get("pods")
        used = sum(
            p.get("status", {}).get("phase") not in ("Succeeded", "Failed") for p in store.all("pods", namespace)
        )
        if most is not None and used >= int(most):
            words = f'pods "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, requested: pods=1, '
            raise RefusedRequest(ApiReason.FORBIDDEN, f"{words}used: pods={used}, limited: pods={most}")


def _unsafe(spec: Object) -> list[str]:
    context, out = spec.get("securityContext") or {}, []
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        own: dict[str, Any] = container.get("securityContext") or {}
        if own.get("allowPrivilegeEscalation") is not False:
            out.append("allowPrivilegeEscalation != false")
        if "ALL" not in ((own.get("capabilities") or {}).get("drop") or []):
            out.append("unrestricted capabilities")
        if not own.get("runAsNonRoot", context.get("runAsNonRoot")):
            out.append("runAsNonRoot != true")
        profile = (own.get("seccompProfile") or context.get("seccompProfile") or {}).get("type")
        if profile not in ("RuntimeDefault", "Localhost"):
            out.append("seccompProfile")
        if own.get("privileged") or own.get("runAsUser", context.get("runAsUser")) == 0:
            out.append("privileged or root")
    out += [f"host {field}" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for volume in spec.get("volumes") or []:
        out += [f"restricted volume type {kind}" for kind in volume if kind != "name" and kind not in allowed]
    return sorted(set(out))
