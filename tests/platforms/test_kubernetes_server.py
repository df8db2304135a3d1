"""The API server in memory answers as a real one: each story is a request and what a 1.36 server says to it. The client
of the operator is the other side, so both are tested together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kube_world import GROUPS

pytest.importorskip("lightkube")
pytest.importorskip("cel")

from everstep.platforms.kubernetes.api_client import ApiReason, ApiServerError, ChangeType, WatchChange
from everstep.platforms.kubernetes.crds import definitions
from everstep.platforms.kubernetes.demo.api_http import ApiHttp
from everstep.platforms.kubernetes.demo.api_server import CRDS, ApiServer
from everstep.platforms.kubernetes.kinds import API_VERSION, Kind, Object
from everstep.platforms.kubernetes.lightkube_client import LightkubeClient
from everstep.platforms.kubernetes.manifests import NODE_RULES, RULES, manifests

NS = "default"
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "train:1", "command": ["python", "train.py"]}]}}


def job(name: str = "j", **spec: Any) -> Object:
    worker = {"replicas": 3, "minReplicas": 2, "maxReplicas": 5, "template": TEMPLATE, **spec.pop("worker", {})}
    meta = {"name": name, "namespace": NS}
    return {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": meta, "spec": {"worker": worker, **spec}}


def pod(name: str, **spec: Any) -> Object:
    containers = [{"name": "main", "image": "x"}]
    meta = {"name": name, "namespace": NS, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": containers, **spec}}


@pytest.fixture
def server() -> ApiServer:
    made = ApiServer()
    for definition in definitions():
        made.create(made.of(CRDS), "", definition)
    return made


@pytest.fixture
def http(server: ApiServer) -> Iterator[ApiHttp]:
    served = ApiHttp(server)
    yield served
    served.close()


@pytest.fixture
def client(http: ApiHttp) -> Iterator[LightkubeClient]:
    made = LightkubeClient.connect(url=http.url, token="any")
    yield made
    made.close()


def refused(call: Any, *arguments: Any, **more: Any) -> ApiServerError:
    with pytest.raises(ApiServerError) as caught:
        call(*arguments, **more)
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_a_server_fills_in(client: LightkubeClient) -> None:
    made = client.create(Kind.JOB, NS, job(unknown=1))
    meta, spec = made["metadata"], made["spec"]
    assert meta["uid"] and meta["resourceVersion"] and meta["creationTimestamp"] and meta["generation"] == 1
    assert "unknown" not in spec, "it is pruned"
    assert spec["mode"] == "AllReduce" and spec["cleanPodPolicy"] == "Running" and spec["worker"]["restartLimit"] == 10
    assert spec["worker"]["template"] == TEMPLATE, "templates are kept as they are"
    assert "status" not in client.create(Kind.JOB, NS, {**job("k"), "status": {"phase": "Running"}})


def test_names(client: LightkubeClient) -> None:
    client.create(Kind.JOB, NS, job())
    assert refused(client.create, Kind.JOB, NS, job()).reason is ApiReason.ALREADY_EXISTS
    assert refused(client.create, Kind.JOB, NS, job("No_Name")).reason is ApiReason.INVALID
    assert refused(client.get, Kind.JOB, NS, "nobody").reason is ApiReason.NOT_FOUND
    absent = refused(client.create, Kind.JOB, "absent", {**job(), "metadata": {"name": "j", "namespace": "absent"}})
    assert absent.reason is ApiReason.NOT_FOUND and "namespaces" in str(absent)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"mode": "Bogus"}, "supported values"),
        ({"worker": {"replicas": -5}}, "greater than or equal to 0"),
        ({"worker": {"replicas": 9}}, "replicas is above maxReplicas"),
        ({"worker": {"replicas": 1}}, "replicas is below minReplicas"),
        ({"worker": {"replicas": "3"}}, "must be of type integer"),
        ({"worker": {"template": None}}, "must be of type object"),
        ({"mode": "ParameterServer"}, "need ps"),
        ({"psProtection": {"strategy": "Parity"}}, "Parity needs dataShards"),
        ({"spot": {"roles": ["worker", "worker"]}}, "Duplicate value"),
        ({"cost": {"budget": "12 USD"}}, "should match"),
        ({"worker": {"price": {"onDemandHourly": "3.0600000"}}}, "should match"),
    ],
)
def test_what_our_kinds_refuse(client: LightkubeClient, spec: dict[str, Any], words: str) -> None:
    error = refused(client.create, Kind.JOB, NS, job(**spec))
    assert error.reason is ApiReason.INVALID and words in str(error)


def test_zero_workers_are_allowed(client: LightkubeClient) -> None:
    assert client.create(Kind.JOB, NS, job(worker={"replicas": 0}))["spec"]["worker"]["replicas"] == 0


def test_what_may_not_change(client: LightkubeClient) -> None:
    client.create(Kind.JOB, NS, job())
    for change in ({"mode": "ParameterServer", "ps": {"template": TEMPLATE}}, {"managedBy": "x"}):
        assert "immutable" in str(refused(client.patch, Kind.JOB, NS, "j", {"spec": change}))
    body = {"apiVersion": API_VERSION, "kind": "ScaleIn", "metadata": {"name": "s", "namespace": NS}}
    both = {"jobName": "j", "count": 1, "podNames": ["a"]}
    for spec in (both, {"jobName": "j"}):
        assert "exactly one" in str(refused(client.create, Kind.SCALE_IN, NS, {**body, "spec": spec}))
    client.create(Kind.SCALE_IN, NS, {**body, "spec": {"jobName": "j", "count": 1}})
    assert "immutable" in str(refused(client.patch, Kind.SCALE_IN, NS, "s", {"spec": {"count": 2}}))


def test_versions_and_generations(client: LightkubeClient, server: ApiServer) -> None:
    made = client.create(Kind.JOB, NS, job())
    old = made["metadata"]["resourceVersion"]
    changed = client.patch(
        Kind.JOB, NS, "j", {"metadata": {"resourceVersion": old}, "spec": {"worker": {"replicas": 4}}}
    )
    assert changed["metadata"]["generation"] == 2 and changed["metadata"]["resourceVersion"] != old
    stale = {"metadata": {"resourceVersion": old}, "spec": {"worker": {"replicas": 5}}}
    assert refused(client.patch, Kind.JOB, NS, "j", stale).reason is ApiReason.CONFLICT
    writes = server.store.writes
    client.patch(Kind.JOB, NS, "j", {"spec": {"worker": {"replicas": 4}}})
    assert server.store.writes == writes, "what changes nothing is not written"
    labelled = client.patch(Kind.JOB, NS, "j", {"metadata": {"labels": {"a": "b"}}})
    assert labelled["metadata"]["generation"] == 2, "labels are not the spec"


def status(version: str, **told: Any) -> Object:
    meta = {"name": "j", "namespace": NS, "resourceVersion": version}
    return {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": meta, "status": told}


def test_status_is_written_apart(client: LightkubeClient) -> None:
    made = client.create(Kind.JOB, NS, job())
    version = made["metadata"]["resourceVersion"]
    told = client.apply_status(
        Kind.JOB, NS, {**status(version, phase="Running", podsMade=3), "spec": {"suspend": True}}
    )
    assert told["status"] == {"phase": "Running", "podsMade": 3} and told["spec"]["suspend"] is False
    assert told["metadata"]["generation"] == 1
    assert refused(client.apply_status, Kind.JOB, NS, status(version, phase="x")).reason is ApiReason.CONFLICT
    client.patch(Kind.JOB, NS, "j", {"status": {"phase": "Failed"}})
    assert client.get(Kind.JOB, NS, "j")["status"]["phase"] == "Running", "the object's own verbs leave it alone"
    now = client.get(Kind.JOB, NS, "j")["metadata"]["resourceVersion"]
    told = client.apply_status(Kind.JOB, NS, status(now, phase="Running"))
    assert told["status"] == {"phase": "Running"}, "a field that is applied no more goes"
    now = told["metadata"]["resourceVersion"]
    twice = [{"type": "Ready", "status": "True"}, {"type": "Ready", "status": "False"}]
    assert refused(client.apply_status, Kind.JOB, NS, status(now, conditions=twice)).reason is ApiReason.INVALID


def test_apply_makes_owns_and_conflicts(client: LightkubeClient, server: ApiServer) -> None:
    assert client.apply(Kind.JOB, NS, job())["spec"]["worker"]["replicas"] == 3
    of = server.of("elasticjobs")
    with pytest.raises(Exception, match="conflict with"):
        server.apply(of, NS, "j", job(worker={"replicas": 4}), "somebody")
    server.apply(of, NS, "j", job(worker={"replicas": 4}), "somebody", force=True)
    error = refused(client.apply, Kind.JOB, NS, job(worker={"replicas": 5}))
    assert error.reason is ApiReason.CONFLICT and error.causes == ("FieldManagerConflict",)
    same = client.apply(Kind.JOB, NS, job(worker={"replicas": 4}))
    assert same["spec"]["worker"]["replicas"] == 4, "the same value is no conflict"


def test_scale_is_guarded_by_the_rules(server: ApiServer, client: LightkubeClient) -> None:
    client.create(Kind.JOB, NS, job())
    of = server.of("elasticjobs")
    assert server.scale(of, NS, "j")["spec"]["replicas"] == 3
    assert server.scale(of, NS, "j", {"spec": {"replicas": 4}})["spec"]["replicas"] == 4
    for count, words in ((99, "above maxReplicas"), (1, "below minReplicas")):
        with pytest.raises(Exception, match=words):
            server.scale(of, NS, "j", {"spec": {"replicas": count}})
    assert client.get(Kind.JOB, NS, "j")["spec"]["worker"]["replicas"] == 4


def test_lists_select(http: ApiHttp, client: LightkubeClient) -> None:
    import httpx2

    for name in ("a", "b"):
        client.create(Kind.POD, NS, pod(name))
    base = f"{http.url}/api/v1/namespaces/{NS}/pods"

    def names(query: str) -> list[str]:
        return [each["metadata"]["name"] for each in httpx2.get(f"{base}?{query}").json()["items"]]

    assert names("labelSelector=app%3Da") == ["a"] and names("labelSelector=app!%3Da") == ["b"]
    assert names("fieldSelector=metadata.name%3Db") == ["b"] and names("labelSelector=!app") == []
    assert httpx2.get(f"{base}?fieldSelector=spec.foo%3Db").status_code == 400
    first = httpx2.get(f"{base}?limit=1").json()
    assert len(first["items"]) == 1 and names(f"limit=1&continue={first['metadata']['continue']}") == ["b"]


def watched(client: LightkubeClient, version: str, count: int) -> list[WatchChange]:
    told: list[WatchChange] = []
    for change in client.watch(Kind.POD, NS, version, 60):
        told.append(change)
        if len(told) == count:
            break
    return told


def test_a_watch_replays_and_goes_on(client: LightkubeClient) -> None:
    _, version = client.list_all(Kind.POD, NS)
    client.create(Kind.POD, NS, pod("a"))
    told: list[WatchChange] = []
    thread = threading.Thread(target=lambda: told.extend(watched(client, version, 3)), daemon=True)
    thread.start()
    client.create(Kind.POD, NS, pod("b"))
    client.delete(Kind.POD, NS, "a")
    thread.join(60)
    assert [(c.type, c.thing["metadata"]["name"]) for c in told] == [
        (ChangeType.ADDED, "a"),
        (ChangeType.ADDED, "b"),
        (ChangeType.DELETED, "a"),
    ]


def test_a_watch_of_what_is_forgotten_is_gone(client: LightkubeClient, server: ApiServer) -> None:
    _, version = client.list_all(Kind.POD, NS)
    client.create(Kind.POD, NS, pod("a"))
    server.store.forget()
    error = refused(lambda: watched(client, version, 1))
    assert error.reason in (ApiReason.EXPIRED, ApiReason.GONE) and error.code == 410


def test_deleting(client: LightkubeClient, server: ApiServer) -> None:
    owner = client.create(Kind.JOB, NS, job())
    reference = {"apiVersion": API_VERSION, "kind": "ElasticJob", "name": "j", "uid": owner["metadata"]["uid"]}
    owned = pod("mine")
    owned["metadata"]["ownerReferences"] = [reference]
    client.create(Kind.POD, NS, owned)
    assert refused(client.delete, Kind.JOB, NS, "j", "another-uid").reason is ApiReason.CONFLICT
    client.patch(Kind.JOB, NS, "j", {"metadata": {"finalizers": ["x/y"]}})
    client.delete(Kind.JOB, NS, "j", owner["metadata"]["uid"])
    assert client.get(Kind.JOB, NS, "j")["metadata"]["deletionTimestamp"], "its finalizer holds it"
    client.patch(Kind.JOB, NS, "j", {"metadata": {"finalizers": None}})
    assert refused(client.get, Kind.JOB, NS, "j").reason is ApiReason.NOT_FOUND
    assert client.list_all(Kind.POD, NS)[0] == [], "what it owned went with it"


def test_pods(client: LightkubeClient, server: ApiServer) -> None:
    assert refused(client.create, Kind.POD, NS, pod("a", containers=[])).reason is ApiReason.INVALID
    mounted = [{"name": "main", "image": "x", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]
    assert "Not found" in str(refused(client.create, Kind.POD, NS, pod("a", containers=mounted)))
    made = client.create(Kind.POD, NS, pod("a"))
    assert made["status"]["phase"] == "Pending" and made["spec"]["terminationGracePeriodSeconds"] == 30
    assert {t["tolerationSeconds"] for t in made["spec"]["tolerations"]} == {300}
    assert "may not change" in str(refused(client.patch, Kind.POD, NS, "a", {"spec": {"hostname": "b"}}))
    made["spec"]["nodeName"], made["status"] = "n", {"phase": "Running"}
    server.store.put("pods", made)
    client.delete(Kind.POD, NS, "a")
    assert client.get(Kind.POD, NS, "a")["metadata"]["deletionGracePeriodSeconds"] == 30
    client.delete(Kind.POD, NS, "a", grace_s=0)
    assert refused(client.get, Kind.POD, NS, "a").reason is ApiReason.NOT_FOUND


def test_four_kinds_of_403_and_how_they_are_told_apart(server: ApiServer, client: LightkubeClient) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    server.create(server.of("resourcequotas"), NS, quota)
    client.create(Kind.POD, NS, pod("a"))
    error = refused(client.create, Kind.POD, NS, pod("b"))
    assert error.reason is ApiReason.FORBIDDEN and "exceeded quota" in str(error)
    assert client.may("create", Kind.POD, NS)
    level = {"name": "safe", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    server.create(server.of("namespaces"), "", {"metadata": level})
    unsafe = {**pod("a"), "metadata": {"name": "a", "namespace": "safe"}}
    assert "violates PodSecurity" in str(refused(client.create, Kind.POD, "safe", unsafe))
    server.merge(server.of("namespaces"), "", "safe", {"metadata": {"finalizers": ["kubernetes"]}})
    server.delete(server.of("namespaces"), "", "safe")
    assert refused(client.create, Kind.POD, "safe", unsafe).causes == ("NamespaceTerminating",)


def test_eviction_heeds_budgets(server: ApiServer, client: LightkubeClient) -> None:
    budget = {"metadata": {"name": "b"}, "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "a"}}}}
    server.create(server.of("poddisruptionbudgets"), NS, budget)
    made = client.create(Kind.POD, NS, pod("a"))
    made["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    made["spec"]["nodeName"] = "n"
    server.store.put("pods", made)
    with pytest.raises(Exception, match="disruption budget") as caught:
        server.evict(NS, "a")
    assert caught.value.code == 429  # type: ignore[attr-defined]
    server.merge(server.of("poddisruptionbudgets"), NS, "b", {"spec": {"maxUnavailable": 1}})
    server.evict(NS, "a")
    gone = client.get(Kind.POD, NS, "a")
    assert gone["metadata"]["deletionTimestamp"]
    assert gone["status"]["conditions"][-1]["reason"] == "EvictionByEvictionAPI"


def test_the_rights_of_the_manifests_are_enough_and_no_more(server: ApiServer) -> None:
    http = ApiHttp(server, {"operator": [*RULES, *NODE_RULES], "pods": []})
    client = LightkubeClient.connect(url=http.url, token="operator")
    nobody = LightkubeClient.connect(url=http.url, token="stranger")
    try:
        server.create(server.of("elasticjobs"), NS, job())
        for kind in Kind:
            if kind not in (Kind.SECRET, Kind.LEASE, Kind.EVENT, *GROUPS):
                client.list_all(kind, "" if kind is Kind.NODE else NS)
        version = client.get(Kind.JOB, NS, "j")["metadata"]["resourceVersion"]
        client.apply_status(Kind.JOB, NS, status(version, phase="Pending"))
        client.create(Kind.POD, NS, pod("a"))
        client.delete(Kind.POD, NS, "a")
        for call in (
            lambda: client.list_all(Kind.SECRET, NS),
            lambda: client.delete(Kind.SECRET, NS, "s"),
            lambda: client.delete(Kind.NODE, "", "n"),
            lambda: client.patch(Kind.POD, NS, "a", {}),
        ):
            assert refused(call).reason is ApiReason.FORBIDDEN
        assert client.may("create", Kind.POD, NS) and not client.may("delete", Kind.NODE, "")
        assert refused(nobody.get, Kind.JOB, NS, "j").reason is ApiReason.UNAUTHORIZED
    finally:
        client.close()
        nobody.close()
        http.close()


def test_the_manifests_are_taken(server: ApiServer) -> None:
    made = ApiServer()
    kinds = {r.kind: r for r in made.resources.values()}
    for thing in manifests("train", "everstep:1"):
        of = kinds[thing["kind"]]
        made.create(of, "train" if of.namespaced else "", thing)
    deployment = made.store.get("deployments", "train", "everstep-operator")
    assert deployment is not None
    spec = deployment["spec"]["template"]["spec"]
    made.create(made.of("pods"), "train", {"metadata": {"name": "o"}, "spec": spec})  # restricted pod security takes it


def test_our_pods_pass_restricted_pod_security(server: ApiServer) -> None:
    from everstep.platforms.kubernetes.kinds import Place
    from everstep.platforms.kubernetes.objects import pod as pod_of

    level = {"name": "safe", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    server.create(server.of("namespaces"), "", {"metadata": level})
    spec = {"mode": "ParameterServer", "ps": {"template": TEMPLATE}}
    made = {**job(**spec), "metadata": {"name": "j", "namespace": "safe"}}
    stored = server.create(server.of("elasticjobs"), "safe", made)
    for n, place in enumerate(Place):
        server.create(server.of("pods"), "safe", pod_of(stored, place, 0, n, {}))


def test_a_schema_with_a_rule_that_is_none_is_refused() -> None:
    made = ApiServer()
    definition = definitions()[0]
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema = {**schema, "x-kubernetes-validations": [{"rule": "self.spec ==", "message": "x"}]}
    definition["spec"]["versions"][0]["schema"] = {"openAPIV3Schema": schema}
    with pytest.raises(Exception, match="rule"):
        made.create(made.of(CRDS), "", definition)
    fresh = definitions()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert "x-kubernetes-validations" not in fresh
