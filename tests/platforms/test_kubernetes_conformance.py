"""The API server in memory answers the transcripts as a real one does; deviations, planted one at a time, are found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lightkube")
pytest.importorskip("cel")

from api_transcript import NAMES, AnotherAnswer, play

from everstep.platforms.kubernetes.demo import api_http, api_server, field_owners, schemas
from everstep.platforms.kubernetes.demo.api_http import ApiHttp
from everstep.platforms.kubernetes.demo.api_server import ApiServer
from everstep.platforms.kubernetes.demo.object_store import ObjectStore

Patch = pytest.MonkeyPatch
Deviation = Callable[[Patch], None]


def instead(holder: Any, name: str, by: Any) -> Deviation:
    """Return the deviation that has ``by`` in the place of a function. ``by`` gets that function first."""

    def plant(patch: Patch) -> None:
        true = getattr(holder, name)

        def planted(*args: Any, **more: Any) -> Any:
            return by(true, *args, **more)

        patch.setattr(holder, name, planted)

    return plant


def _no_conflict(true: Any, self: Any, of: Any, old: Any, new: Any, version: Any, *rest: Any) -> Any:
    return true(self, of, old, new, None, *rest)


def _status_writes_all(
    true: Any, self: Any, of: Any, old: Any, new: Any, version: Any, who: Any, part: Any, o: Any
) -> Any:
    if part != "status":
        return true(self, of, old, new, version, who, part, o)
    both = true(self, of, old, new, version, who, "", o)
    return true(self, of, both, {**both, "status": new.get("status", {})}, None, who, part, o)


def _spec_writes_status(
    true: Any, self: Any, of: Any, old: Any, new: Any, version: Any, who: Any, part: Any, o: Any
) -> Any:
    stored = true(self, of, old, new, version, who, part, o)
    if part or "status" not in new:
        return stored
    return true(self, of, stored, {**stored, "status": new["status"]}, None, who, "status", o)


def _writes_the_same(true: Any, self: Any, of: Any, old: Any, *rest: Any) -> Any:
    stored = true(self, of, old, *rest)
    same = stored["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]
    return self.store.put(of.plural, stored) if same else stored


def _labels_are_a_generation(true: Any, self: Any, of: Any, old: Any, *rest: Any) -> Any:
    stored = true(self, of, old, *rest)
    if stored["metadata"].get("labels") == old["metadata"].get("labels"):
        return stored
    stored["metadata"]["generation"] = old["metadata"]["generation"] + 1
    return self.store.put(of.plural, stored)


def _no_finalizers(true: Any, self: Any, of: Any, namespace: str, name: str, *rest: Any) -> Any:
    gone = true(self, of, namespace, name, *rest)
    if gone["metadata"].get("finalizers"):
        self._drop(of, gone)
    return gone


def _evicts_always(true: Any, self: Any, namespace: str, name: str) -> None:
    self.disrupt(self._there(self.of("pods"), namespace, name), "EvictionByEvictionAPI")
    self.delete(self.of("pods"), namespace, name)


def _says_not_why(true: Any, self: Any, pod: Any, reason: str) -> None:
    pass


def _no_bookmarks(true: Any, handler: Any, thing: Any) -> None:
    if thing["type"] != "BOOKMARK":
        true(handler, thing)


def _goes_on_from_what_is_left(true: Any, self: Any, plural: str, version: int, wait_s: float) -> Any:
    return true(self, plural, max(version, self._forgotten), wait_s)


def _tells_no_end(true: Any, handler: Any, thing: Any) -> None:
    if thing["type"] != "DELETED":
        true(handler, thing)


def _no_fields(true: Any, thing: Any, query: Any) -> bool:
    return bool(true(thing, {k: v for k, v in query.items() if k != "fieldSelector"}))


def _scale_without_rules(true: Any, self: Any, *args: Any) -> Any:
    checked, self._checked = self._checked, lambda of, thing, old: copy.deepcopy(thing)
    try:
        return true(self, *args)
    finally:
        self._checked = checked


def _forces(true: Any, self: Any, of: Any, ns: str, name: str, body: Any, who: str, force: bool, *more: Any) -> Any:
    return true(self, of, ns, name, body, who, True, *more)


def _no_uid(true: Any, self: Any, of: Any, namespace: str, name: str, uid: str = "", grace_s: Any = None) -> Any:
    return true(self, of, namespace, name, "", grace_s)


def _no_grace(true: Any, self: Any, of: Any, namespace: str, name: str, uid: str = "", grace_s: Any = None) -> Any:
    return true(self, of, namespace, name, uid, 0)


def _replaces(true: Any, self: Any, of: Any, namespace: str, body: Any, *rest: Any) -> Any:
    held = self.store.get(of.plural, namespace, (body.get("metadata") or {}).get("name", ""))
    if held is not None:
        self.store.drop(of.plural, held)
    return true(self, of, namespace, body, *rest)


def _nothing(true: Any, *args: Any) -> None:
    pass


def _first(true: Any, value: Any, *rest: Any) -> Any:
    return value


DEVIATIONS: dict[str, tuple[str, Deviation]] = {  # what deviates -> the transcript that finds it
    "an old version is no conflict": ("versions", instead(ApiServer, "_store", _no_conflict)),
    "what changes nothing is written": ("versions", instead(ApiServer, "_store", _writes_the_same)),
    "labels are a generation": ("versions", instead(ApiServer, "_store", _labels_are_a_generation)),
    "a second object replaces the first": ("names", instead(ApiServer, "create", _replaces)),
    "a namespace need not be there": ("names", instead(ApiServer, "_need_namespace", _nothing)),
    "unknown fields are kept": ("schema", instead(schemas, "pruned", _first)),
    "no defaults": ("schema", instead(schemas, "defaulted", _first)),
    "types do not matter": ("schema", instead(schemas, "_wrong_type", _nothing)),
    "bounds do not matter": ("schema", instead(schemas, "_bounds", lambda true, *args: iter(()))),
    "no CEL": ("rules", instead(schemas, "_broken_rules", lambda true, *args: iter(()))),
    "scale goes past the rules": ("scale", instead(ApiServer, "scale", _scale_without_rules)),
    "a status changes the spec": ("status", instead(ApiServer, "_store", _status_writes_all)),
    "the object's verbs write the status": ("status", instead(ApiServer, "_store", _spec_writes_status)),
    "apply conflicts with nobody": ("apply", instead(ApiServer, "apply", _forces)),
    "what is applied no more stays": ("apply", instead(field_owners, "_remove", _nothing)),
    "labels choose nothing": ("lists", instead(api_http, "_label_term", lambda true, *args: True)),
    "fields choose nothing": ("lists", instead(api_http, "selected", _no_fields)),
    "no bookmarks": ("watches", instead(api_http, "_chunk", _no_bookmarks)),
    "a watch tells no end": ("watches", instead(api_http, "_chunk", _tells_no_end)),
    "no 410": ("watches", instead(ObjectStore, "since", _goes_on_from_what_is_left)),
    "finalizers hold nothing": ("deleting", instead(ApiServer, "delete", _no_finalizers)),
    "owned objects stay": ("deleting", instead(ApiServer, "_collect", _nothing)),
    "a uid is no precondition": ("deleting", instead(ApiServer, "delete", _no_uid)),
    "pods go at once": ("pods", instead(ApiServer, "delete", _no_grace)),
    "a pod's spec may change": ("pods", instead(api_server, "_frozen", _nothing)),
    "eviction heeds no budget": ("eviction", instead(ApiServer, "evict", _evicts_always)),
    "eviction does not say why": ("eviction", instead(ApiServer, "disrupt", _says_not_why)),
    "no quota, no pod security": ("refusals", instead(api_server, "admit_pod", _nothing)),
    "an ending namespace takes pods": ("refusals", instead(ApiServer, "_need_namespace", _nothing)),
    "rights do not matter": ("refusals", instead(ApiHttp, "_check_rights", _nothing)),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_server_answers_as_a_real_one(name: str) -> None:
    play(name)


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_planted_deviation_is_found(deviation: str, monkeypatch: Patch) -> None:
    name, plant = DEVIATIONS[deviation]
    plant(monkeypatch)
    with pytest.raises(AnotherAnswer, match=name):
        play(name)


def test_every_transcript_finds_a_deviation() -> None:
    assert {name for name, _ in DEVIATIONS.values()} == set(NAMES)
