"""Makes the manifests of the operator: rights, account, deployment. The one source of what it may do."""

from __future__ import annotations

from typing import Final

from everstep.platforms.kubernetes.crds import definitions, documents
from everstep.platforms.kubernetes.kinds import GROUP, Object

NAME: Final = "everstep-operator"


def _rule(group: str, resources: list[str], *verbs: str) -> Object:
    return {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}


RULES: Final = (
    _rule(GROUP, ["elasticjobs"], "get", "list", "watch", "patch", "delete"),
    _rule(GROUP, ["scaleouts", "scaleins"], "get", "list", "watch", "delete"),
    _rule(GROUP, ["elasticjobs/status", "scaleouts/status", "scaleins/status"], "patch"),
    _rule("", ["pods"], "list", "watch", "create", "delete"),
    _rule("", ["services", "persistentvolumeclaims"], "list", "watch", "create"),
    _rule("", ["secrets"], "get", "create"),
    _rule("", ["resourcequotas"], "list"),
    _rule("", ["events"], "create"),
    _rule("policy", ["poddisruptionbudgets"], "list", "watch", "create"),
    _rule("scheduling.volcano.sh", ["podgroups"], "get", "create", "patch", "delete"),
    _rule("scheduling.x-k8s.io", ["podgroups"], "get", "create", "patch", "delete"),
    _rule("scheduling.k8s.io", ["podgroups"], "get", "create", "patch", "delete"),
    _rule("coordination.k8s.io", ["leases"], "get", "create", "patch"),
)
"""What the operator may do in its namespace."""
NODE_RULES: Final = (_rule("", ["nodes"], "list", "watch"),)
"""What it may do in the whole cluster. Without, it learns of notices by the pods alone."""


def manifests(namespace: str, image: str) -> tuple[Object, ...]:
    """Return all that a cluster needs: the kinds, rights, and the operator itself."""
    meta = {"name": NAME, "namespace": namespace}
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    role = {"apiGroup": rbac, "kind": "Role", "name": NAME}
    cluster_role = {"apiGroup": rbac, "kind": "ClusterRole", "name": f"{NAME}-nodes"}
    nodes = {"name": f"{NAME}-nodes"}
    return (
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        },
        *definitions(),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": list(RULES)},
        {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": meta, "roleRef": role, "subjects": [account]},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": nodes, "rules": list(NODE_RULES)},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": nodes,
            "roleRef": cluster_role,
            "subjects": [account],
        },
        _deployment(meta, namespace, image),
    )


def _deployment(meta: Object, namespace: str, image: str) -> Object:
    labels = {"app.kubernetes.io/name": NAME}
    container = {
        "name": "main",
        "image": image,
        "command": ["everstep", "operator", "--namespace", namespace],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def printed_manifests(namespace: str, image: str) -> str:
    """Return the manifests as YAML, for ``kubectl apply``."""
    head = "# The operator of everstep, printed by `everstep operator --manifests`.\n"
    return head + documents(manifests(namespace, image))
