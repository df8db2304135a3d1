"""The Helm chart is the manifests. Helm is not here: a strict reader fills in the few templates that it may have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep import __version__
from everstep.platforms.kubernetes.chart import chart
from everstep.platforms.kubernetes.kinds import Object
from everstep.platforms.kubernetes.manifests import manifests

IMAGE = "registry.io/everstep:1"


def filled(text: str, values: dict[str, Any], namespace: str) -> str:
    """Do what Helm does with values, the namespace, and an ``if`` round a whole file; anything else is an error."""
    lines = text.splitlines()
    if lines[0].startswith("{{- if"):
        asked = re.fullmatch(r"\{\{- if \.Values\.(\w+) \}\}", lines[0])
        assert asked and lines[-1] == "{{- end }}", lines
        lines = lines[1:-1] if values[asked[1]] else []
    whole = "\n".join(lines).replace("{{ .Release.Namespace }}", namespace)
    whole = re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda found: str(values[found[1]]), whole)
    assert "{{" not in whole and "}}" not in whole, whole
    return whole


def rendered(files: dict[str, str], namespace: str, **more: Any) -> list[Object]:
    values = {**yaml.safe_load(files["values.yaml"]), **more}
    texts = [text for path, text in files.items() if path.startswith("templates/")]
    return [thing for text in texts if (thing := yaml.safe_load(filled(text, values, namespace))) is not None]


def renamed(thing: Object, namespace: str) -> Object:
    """Return an object of the manifests as the chart names it: what is of the whole cluster has the namespace in it."""
    text = yaml.safe_dump(thing)
    return dict(yaml.safe_load(text.replace("everstep-operator-nodes", f"everstep-operator-nodes-{namespace}")))


def test_the_chart_makes_what_the_manifests_say() -> None:
    files = chart(IMAGE, __version__)
    of_chart = [*rendered(files, "train"), *yaml.safe_load_all(files["crds/everstep.yaml"])]
    plain = [renamed(thing, "train") for thing in manifests("train", IMAGE) if thing["kind"] != "Namespace"]
    key = lambda thing: (thing["kind"], thing["metadata"]["name"])  # noqa: E731
    assert sorted(of_chart, key=key) == sorted(plain, key=key)
    about = yaml.safe_load(files["Chart.yaml"])
    assert about["apiVersion"] == "v2" and about["version"] == about["appVersion"] == __version__


def test_values_change_what_they_name_and_nothing_else() -> None:
    files = chart(IMAGE, __version__)
    few = rendered(files, "team", watchNodes=False, replicas=1, image="other:2")
    assert sorted(t["kind"] for t in few) == ["Deployment", "Role", "RoleBinding", "ServiceAccount"]
    deployment = next(t for t in few if t["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert deployment["spec"]["replicas"] == 1 and container["image"] == "other:2"
    assert container["command"][-2:] == ["--namespace", "team"]
    assert all(t["metadata"]["namespace"] == "team" for t in few)


@pytest.mark.parametrize("broken", ["image: {{ .Values.nothing }}", "{{ include 'x' }}", "name: {{ .Release.Name }}"])
def test_the_reader_is_strict(broken: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        filled(broken, {"image": IMAGE}, "train")


@pytest.mark.processes
def test_it_is_written_and_only_over_another_chart(tmp_path: Path) -> None:
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "everstep.cli", "operator", "--chart", str(folder), "--image", IMAGE]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    for _ in range(2):
        done = run(tmp_path / "chart")
        assert done.returncode == 0 and "helm install" in done.stdout, done.stderr
    found = {str(p.relative_to(tmp_path / "chart")) for p in (tmp_path / "chart").rglob("*.yaml")}
    assert found == set(chart(IMAGE, __version__))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").touch()
    done = run(tmp_path / "other")
    assert done.returncode == 2 and "has something else in it" in done.stderr and done.stderr.count("\n") == 1
