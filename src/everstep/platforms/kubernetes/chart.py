"""Makes a Helm chart of the operator out of its manifests: the same objects, with what differs between clusters as
values."""

from __future__ import annotations

from typing import Final

from everstep.platforms.kubernetes.crds import definitions, documents
from everstep.platforms.kubernetes.kinds import Object, name_of
from everstep.platforms.kubernetes.manifests import NAME, manifests

_NAMESPACE: Final = "everstep-release-namespace"
_IMAGE: Final = "everstep-value-image"
_CLUSTER_KINDS: Final = ("ClusterRole", "ClusterRoleBinding")
"""Without these the operator reads no nodes; they are of the whole cluster, so each release has its own."""


def chart(image: str, version: str) -> dict[str, str]:
    """Return the files of the chart: path -> text. ``image``: the default; ``version``: of everstep."""
    files = {
        "Chart.yaml": documents(
            [
                {
                    "apiVersion": "v2",
                    "name": NAME,
                    "description": "The operator of everstep: elastic, fault-tolerant training",
                    "type": "application",
                    "version": version,
                    "appVersion": version,
                }
            ]
        ),
        "values.yaml": _values(image),
        "crds/everstep.yaml": documents(definitions()),
    }
    for thing in manifests(_NAMESPACE, _IMAGE):
        kind = thing["kind"]
        if kind not in ("Namespace", "CustomResourceDefinition"):
            files[f"templates/{kind.lower()}.yaml"] = _template(thing)
    return files


def _values(image: str) -> str:
    lines = (
        "# With everstep in it.",
        documents([{"image": image}]).rstrip(),
        "# One acts, the others wait for its Lease.",
        "replicas: 2",
        "# Watch nodes: notices by taints and conditions (a ClusterRole). Without, they are taken from pods alone.",
        "watchNodes: true",
    )
    return "\n".join(lines) + "\n"


def _template(thing: Object) -> str:
    """Return an object as a template. Names of places are written out by Helm within YAML's quotes."""
    replicas = thing["kind"] == "Deployment"
    text = documents([thing])
    text = text.replace(_NAMESPACE, "{{ .Release.Namespace }}").replace(_IMAGE, "{{ .Values.image }}")
    lines = [_quoted(line) for line in text.splitlines()]
    if replicas:
        lines = ["  replicas: {{ .Values.replicas }}" if line.startswith("  replicas: ") else line for line in lines]
    if thing["kind"] in _CLUSTER_KINDS:
        own = f"{name_of(thing)}-{{{{ .Release.Namespace }}}}"
        lines = [line.replace(f"name: {name_of(thing)}", f'name: "{own}"') for line in lines]
        lines = ["{{- if .Values.watchNodes }}", *lines, "{{- end }}"]
    return "\n".join(lines) + "\n"


def _quoted(line: str) -> str:
    """Return a line of YAML with its value quoted, if Helm writes it."""
    head, begin, value = line.partition("{{ ")
    return f'{head}"{begin}{value}"' if begin else line
