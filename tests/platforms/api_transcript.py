"""Plays a transcript of requests to an API server, and compares each answer with what a real server says.

A file of ``api_transcripts`` is a list of steps in YAML. ``ask``: the method and the path. ``send``: the body.
``kind``: how a patch is meant (merge, apply). ``who``: whose token asks (admin by default). ``code``: the answer's.
``has``: fields of the answer by their paths; ``lacks``: paths that it does not have; ``says``: words of its message;
``names``: those of a list; ``told``: the changes of a watch, in their order. ``keep``: fields of the answer to be
used as ``$NAME`` later. ``server``: what the cluster itself does in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import httpx2
import yaml

from everstep.platforms.kubernetes.crds import definitions
from everstep.platforms.kubernetes.demo.api_http import ApiHttp, Rules
from everstep.platforms.kubernetes.demo.api_server import CRDS, ApiServer

FOLDER = Path(__file__).parent / "api_transcripts"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
ADMIN: Rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
READER: Rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]}]
_KINDS = {"merge": "application/merge-patch+json", "apply": "application/apply-patch+yaml", "": "application/json"}
_NOTHING = object()


class AnotherAnswer(AssertionError):
    """The server's answer is not that of the transcript."""


def _forget(server: ApiServer) -> None:
    server.store.forget()


def _run_pod(server: ApiServer) -> None:
    """A node runs the pod ``a``."""
    pod = server.store.get("pods", "default", "a")
    assert pod is not None
    pod["spec"]["nodeName"] = "n"
    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    server.store.put("pods", pod)


_ACTS: Mapping[str, Callable[[ApiServer], None]] = {"forget": _forget, "run pod a": _run_pod}


def play(name: str) -> None:
    """Play a transcript on a new server. Raise AnotherAnswer at the first answer that differs."""
    server = ApiServer()
    for definition in definitions():
        server.create(server.of(CRDS), "", definition)
    http = ApiHttp(server, {"admin": ADMIN, "reader": READER})
    kept: dict[str, str] = {}
    try:
        with httpx2.Client(base_url=http.url, timeout=30) as client:
            for n, raw in enumerate(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), 1):
                if "server" in raw:
                    _ACTS[raw["server"]](server)
                    continue
                step = json.loads(Template(json.dumps(raw)).substitute(kept))
                _step(client, step, kept, f"{name}, step {n}, {step['ask']}")
    finally:
        http.close()


def _step(client: httpx2.Client, step: dict[str, Any], kept: dict[str, str], where: str) -> None:
    method, path = step["ask"].split()
    headers = {"Authorization": f"Bearer {step.get('who', 'admin')}", "Content-Type": _KINDS[step.get("kind", "")]}
    content = json.dumps(step["send"]) if "send" in step else None
    answer = client.request(method, path, headers=headers, content=content)
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    _same(answer.status_code, step.get("code", 200), f"{where}: code ({answer.text[:300]})")
    if "told" in step:
        _same([_change(line) for line in lines], step["told"], f"{where}: told")
        return
    (thing,) = lines
    for path, want in step.get("has", {}).items():
        _same(_at(thing, path), want, f"{where}: {path}")
    for path in step.get("lacks", ()):
        _same(_at(thing, path), _NOTHING, f"{where}: {path}")
    if "says" in step and step["says"] not in thing.get("message", ""):
        raise AnotherAnswer(f"{where}: its message is {thing.get('message')!r}, without {step['says']!r}")
    if "names" in step:
        _same([each["metadata"]["name"] for each in thing["items"]], step["names"], f"{where}: names")
    for word, path in step.get("keep", {}).items():
        if (found := _at(thing, path)) is _NOTHING:
            raise AnotherAnswer(f"{where}: it has no {path}")
        kept[word] = str(found)


def _change(line: dict[str, Any]) -> str:
    """Return a change of a watch in words: its type, and the object's name or the error's code."""
    thing = line["object"]
    return f"{line['type']} {thing.get('code') or thing['metadata'].get('name', '')}".strip()


def _same(found: object, want: object, where: str) -> None:
    if found != want:
        raise AnotherAnswer(f"{where}: {found!r} instead of {'nothing' if want is _NOTHING else repr(want)}")


def _at(thing: Any, path: str) -> Any:
    for word in path.split("/"):
        if isinstance(thing, list) and word.lstrip("-").isdigit() and -len(thing) <= int(word) < len(thing):
            thing = thing[int(word)]
        elif isinstance(thing, dict) and word in thing:
            thing = thing[word]
        else:
            return _NOTHING
    return thing
