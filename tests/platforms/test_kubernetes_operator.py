"""The operator on a server in memory: it watches, acts, degrades, and gives way. Pods are played by the test."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")
pytest.importorskip("cel")

from click.testing import CliRunner

from everstep import __version__
from everstep.cli.main import cli
from everstep.cli.pod import settings_of
from everstep.errors import EverstepError
from everstep.net.auth import VersionError
from everstep.platforms.kubernetes.actions import MasterReport
from everstep.platforms.kubernetes.crds import definitions
from everstep.platforms.kubernetes.demo.api_http import ApiHttp
from everstep.platforms.kubernetes.demo.api_server import CRDS, ApiServer
from everstep.platforms.kubernetes.demo.gang_schedulers import install
from everstep.platforms.kubernetes.demo.refusals import RefusedRequest
from everstep.platforms.kubernetes.election import DURATION_S, LeaseWatch
from everstep.platforms.kubernetes.kinds import API_VERSION, Gang, Object, name_of
from everstep.platforms.kubernetes.lightkube_client import LightkubeClient, kubeconfig_for
from everstep.platforms.kubernetes.manifests import NODE_RULES, RULES
from everstep.platforms.kubernetes.operator import Operator, WorkQueue

NS = "default"
LEAST = [*RULES, *NODE_RULES]
PRICED = {
    "price": {"onDemandHourly": "2.40"},
    "template": {"spec": {"containers": [{"name": "main", "image": "train:1"}]}},
}


def until(what: Callable[[], object], why: Callable[[], object] = lambda: "", timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, why()
        time.sleep(0.02)


class PlayedMasters:
    """Masters that do as they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.seen: dict[str, Any] = {}
        self.gone: list[str] = []

    def report(self, host: str, secret: str) -> MasterReport:
        workers, ps = self.told[-1] if self.told else (2, 1)
        return MasterReport(workers or 2, ps or 1, **self.seen)

    def tell_size(self, host: str, secret: str, workers: int, ps: int) -> None:
        self.told.append((workers, ps))

    def tell_gone(self, host: str, secret: str, pods: Sequence[str]) -> None:
        self.gone += pods

    def suspend(self, host: str, secret: str, suspensions: int) -> None:
        raise EverstepError("not now")

    def fresh_secret(self) -> str:
        return "a secret"


class Bench:
    """A server, an operator, and pods that start at once."""

    def __init__(
        self,
        rules: list[Object] | None = None,
        masters: PlayedMasters | None = None,
        run: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self.server = ApiServer()
        for definition in definitions():
            self.server.create(self.server.of(CRDS), "", definition)
        self.server.create(self.server.of("nodes"), "", {"metadata": {"name": "n1"}})
        self.http = ApiHttp(self.server, {"operator": rules if rules is not None else LEAST})
        self.lines: list[str] = []
        self.masters = masters if masters is not None else PlayedMasters()
        self._run = run
        self._over = threading.Event()
        self._kubelet = threading.Thread(target=self._play, daemon=True)
        self._kubelet.start()
        self.start()

    def start(self) -> None:
        self.client = LightkubeClient.connect(url=self.http.url, token="operator")
        self.operator = Operator(self.client, NS, self.masters, self.lines.append, run=self._run)
        self._thread = threading.Thread(target=self.operator.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.operator.close()
        self._thread.join(60)
        self.client.close()

    def close(self) -> None:
        self._over.set()
        self._kubelet.join(60)
        self.operator.close()
        self.http.close()
        self.stop()

    def _play(self) -> None:
        while not self._over.wait(0.02):
            for pod in self.server.store.all("pods", NS):
                if pod["metadata"].get("deletionTimestamp"):
                    self._drop(pod)
                elif pod["status"].get("phase") == "Pending":
                    pod["spec"]["nodeName"] = "n1"
                    conditions = [{"type": "Ready", "status": "True"}]
                    pod["status"] = {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions}
                    with self.server.store.lock:
                        if self.server.store.get("pods", NS, name_of(pod)) is not None:
                            self.server.store.put("pods", pod)

    def _drop(self, pod: Object) -> None:
        with contextlib.suppress(RefusedRequest):
            self.server.delete(self.server.of("pods"), NS, name_of(pod), pod["metadata"]["uid"], 0)

    def submit(self, name: str = "j", **spec: Any) -> None:
        template = {"spec": {"containers": [{"name": "main", "image": "train:1"}]}}
        worker = {"replicas": 2, "minReplicas": 1, "maxReplicas": 4, "template": template}
        body = {"mode": "ParameterServer", "script": "train.py", "worker": worker, "ps": {"template": template}, **spec}
        made = {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": {"name": name}, "spec": body}
        self.server.create(self.server.of("elasticjobs"), NS, made)

    def job(self, name: str = "j") -> Object:
        return self.server.store.get("elasticjobs", NS, name) or {}

    def phase(self, name: str = "j") -> str:
        return str((self.job(name).get("status") or {}).get("phase", ""))

    def holds(self, condition: str) -> bool:
        found = {c["type"]: c["status"] for c in (self.job().get("status") or {}).get("conditions") or []}
        return found.get(condition) == "True"

    def why(self) -> object:
        return self.job().get("status"), self.lines, [name_of(p) for p in self.server.store.all("pods", NS)]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(getattr(request, "param", None))
    yield made
    made.close()


def test_a_job_runs_and_what_is_deleted_by_hand_comes_back(bench: Bench) -> None:
    bench.submit()
    until(lambda: bench.phase() == "Running", bench.why)
    assert len(bench.server.store.all("pods", NS)) == 4
    service = bench.server.of("services")
    bench.server.delete(service, NS, "j")
    until(lambda: bench.server.store.get("services", NS, "j"), bench.why)
    bench.server.delete(bench.server.of("pods"), NS, "j-worker-0-3", grace_s=0)
    until(lambda: bench.phase() == "Running" and bench.server.store.get("pods", NS, "j-worker-0-5"), bench.why)


def test_an_operator_that_is_restarted_goes_on_where_it_was(bench: Bench) -> None:
    bench.submit()
    until(lambda: bench.phase() == "Running", bench.why)
    bench.stop()
    names = {name_of(p) for p in bench.server.store.all("pods", NS)}
    bench.server.delete(bench.server.of("pods"), NS, "j-worker-1-4", grace_s=0)
    bench.start()
    until(lambda: bench.server.store.get("pods", NS, "j-worker-1-5"), bench.why)
    assert names - {"j-worker-1-4"} <= {name_of(p) for p in bench.server.store.all("pods", NS)}


def test_a_request_to_scale_is_carried_out_and_the_master_is_told(bench: Bench) -> None:
    bench.submit()
    until(lambda: bench.phase() == "Running", bench.why)
    out = {"apiVersion": API_VERSION, "kind": "ScaleOut", "metadata": {"name": "more"}}
    bench.server.create(bench.server.of("scaleouts"), NS, {**out, "spec": {"jobName": "j", "count": 2}})
    bench.server.create(
        bench.server.of("scaleouts"), NS, {**out, "metadata": {"name": "lost"}, "spec": {"jobName": "x", "count": 2}}
    )

    def ended(name: str) -> str:
        return str(((bench.server.store.get("scaleouts", NS, name) or {}).get("status") or {}).get("phase"))

    until(lambda: ended("more") == "Succeeded" and ended("lost") == "Failed", bench.why)
    assert len(bench.server.store.all("pods", NS)) == 6
    until(lambda: bench.masters.told and bench.masters.told[-1][0] == 4, bench.why)


def test_the_watch_is_told_that_its_version_is_forgotten_and_lists_again(bench: Bench) -> None:
    bench.server.store.forget()
    bench.submit()
    bench.server.store.forget()
    until(lambda: bench.phase() == "Running", bench.why)


def test_a_quota_is_a_condition_and_no_hot_loop(bench: Bench) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    bench.server.create(bench.server.of("resourcequotas"), NS, quota)
    bench.submit()
    until(lambda: bench.holds("QuotaExceeded"), bench.why)
    tried = sum(verb == "create" and of == "pods" for verb, of, _ in bench.http.seen)
    assert tried <= 16, "one look's pods, and no more before its time"
    assert len(bench.lines) <= 16 and "exceeded quota" in bench.lines[0]


@pytest.mark.parametrize("bench", [[r for r in LEAST if r["resources"] != ["nodes"]]], indirect=True)
def test_without_the_right_to_read_nodes_it_works(bench: Bench) -> None:
    bench.submit()
    until(lambda: bench.phase() == "Running", bench.why)
    assert sum("notices are taken from pods alone" in line for line in bench.lines) == 1


class OlderMasters(PlayedMasters):
    """Masters of another version than the operator's, until they are replaced."""

    other = "9.9.9"

    def report(self, host: str, secret: str) -> MasterReport:
        if self.other:
            raise VersionError("the master", 3, self.other)
        return super().report(host, secret)


def test_a_master_of_another_version_is_told_once_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.platforms.kubernetes.operator.ASK_S", 0.1)
    masters = OlderMasters()
    bench = Bench(masters=masters)
    try:
        bench.submit()
        until(lambda: bench.holds("OtherVersion"), bench.why)
        message = {c["type"]: c["message"] for c in bench.job()["status"]["conditions"]}["OtherVersion"]
        assert "everstep 9.9.9 (wire 3)" in message and f"the operator is everstep {__version__}" in message
        until(lambda: bench.phase() == "Running", bench.why)
        assert len([line for line in bench.lines if "9.9.9" in line]) == 1, bench.lines
        masters.other = ""
        until(lambda: not bench.holds("OtherVersion"), bench.why)
    finally:
        bench.close()


NO_PODS = [r if r["resources"] != ["pods"] else {**r, "verbs": ["list", "watch", "delete"]} for r in LEAST]


@pytest.mark.parametrize("bench", [NO_PODS], indirect=True)
def test_a_missing_right_is_named(bench: Bench) -> None:
    bench.submit()
    until(lambda: bench.holds("Forbidden"), bench.why)
    message = {c["type"]: c["message"] for c in bench.job()["status"]["conditions"]}["Forbidden"]
    assert 'cannot create resource "pods"' in message


def test_an_idle_job_costs_two_requests_a_minute_at_most_and_no_write(bench: Bench) -> None:
    bench.submit()
    until(lambda: bench.phase() == "Running", bench.why)
    until(
        lambda: not bench.operator.queue._due or min(bench.operator.queue._due.values()) > time.monotonic() + 2,
        bench.why,
    )
    bench.operator.close()  # (its own thread may be in the middle of a look)
    bench._thread.join(60)
    writes = bench.server.store.writes
    before = len(bench.http.seen)
    for _ in range(12):  # a minute of looks
        bench.operator.look((NS, "j"))
    asked = [one for one in bench.http.seen[before:] if one[0] != "watch"]
    said = bench.server.store.all("events", NS)
    assert bench.server.store.writes == writes and len(asked) <= 2, (asked, said)


def test_a_gang_costs_an_idle_job_one_request_more_and_no_write(bench: Bench) -> None:
    install(bench.server, Gang.VOLCANO)
    bench.submit(scheduling={"gang": "Volcano"})
    until(lambda: bench.phase() == "Running", bench.why)
    group = bench.server.store.get("podgroups", NS, "j") or {}
    assert group["spec"]["minMember"] == 3 and group["metadata"]["ownerReferences"][0]["name"] == "j"
    bench.operator.close()
    bench._thread.join(60)
    for _ in range(5):  # (what the last look left to do)
        bench.operator.look((NS, "j"))
    writes, before = bench.server.store.writes, len(bench.http.seen)
    for _ in range(12):
        bench.operator.look((NS, "j"))
    asked = [one for one in bench.http.seen[before:] if one[0] != "watch"]
    assert bench.server.store.writes == writes and len(asked) <= 3, asked
    bench.server.delete(bench.server.of("elasticjobs"), NS, "j")
    assert not bench.server.store.all("podgroups", NS)


def test_a_group_that_is_deleted_by_hand_comes_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.platforms.kubernetes.operator.GANG_S", 0.2)
    install(bench.server, Gang.SCHEDULER_PLUGINS)
    bench.submit(scheduling={"gang": "SchedulerPlugins"})
    until(lambda: bench.phase() == "Running", bench.why)
    bench.server.delete(bench.server.of("podgroups"), NS, "j")
    until(lambda: bench.server.store.get("podgroups", NS, "j"), bench.why)
    assert len(bench.server.store.all("pods", NS)) == 4


def test_the_clusters_own_group_keeps_its_policy_while_the_job_runs(bench: Bench) -> None:
    """A server that lets nobody change it is not asked again and again."""
    install(bench.server, Gang.NATIVE)
    bench.submit(scheduling={"gang": "Native"})
    until(lambda: bench.phase() == "Running", bench.why)
    bench.server.merge(bench.server.of("elasticjobs"), NS, "j", {"spec": {"ps": {"replicas": 3}}})
    until(lambda: len(bench.server.store.all("pods", NS)) == 6, bench.why)
    group = bench.server.store.get("podgroups", NS, "j") or {}
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3
    assert sum(verb == "patch" and of == "podgroups" for verb, of, _ in bench.http.seen) == 1


@pytest.mark.parametrize("gang", ["Volcano", "SchedulerPlugins", "Native"])
def test_a_cluster_without_the_scheduler_of_the_gang_says_so(bench: Bench, gang: str) -> None:
    bench.submit(scheduling={"gang": gang})
    until(lambda: bench.holds("GangRefused"), bench.why)
    message = {c["type"]: c["message"] for c in bench.job()["status"]["conditions"]}["GangRefused"]
    assert f"spec.scheduling.gang: {gang}: this cluster knows no PodGroup" in message
    assert not bench.server.store.all("pods", NS)
    assert sum(of == "podgroups" and verb == "patch" for verb, of, _ in bench.http.seen) <= 2


NO_GROUPS = [r for r in LEAST if r["resources"] != ["podgroups"]]


@pytest.mark.parametrize("bench", [NO_GROUPS], indirect=True)
def test_a_missing_right_on_groups_is_named(bench: Bench) -> None:
    install(bench.server, Gang.VOLCANO)
    bench.submit(scheduling={"gang": "Volcano"})
    until(lambda: bench.holds("Forbidden"), bench.why)
    message = {c["type"]: c["message"] for c in bench.job()["status"]["conditions"]}["Forbidden"]
    assert 'resource "podgroups"' in message and not bench.server.store.all("pods", NS)


def test_what_happens_to_a_job_is_an_event(bench: Bench) -> None:
    bench.submit()
    until(lambda: bench.phase() == "Running", bench.why)
    until(lambda: "Ready" in {e["reason"] for e in bench.server.store.all("events", NS)}, bench.why)


@pytest.mark.parametrize("bench", [[r for r in LEAST if r["resources"] != ["events"]]], indirect=True)
def test_without_the_right_to_make_events_it_works(bench: Bench) -> None:
    bench.submit()
    bench.submit("k")
    until(lambda: bench.phase() == bench.phase("k") == "Running", bench.why)
    until(lambda: any("without Events" in line for line in bench.lines), bench.why)
    assert sum("without Events" in line for line in bench.lines) == 1


def test_a_dead_master_keeps_no_other_job_waiting() -> None:
    """Its link hangs until the test ends; another job gets its pods, and its master is told."""
    hang = threading.Event()

    class Dead(PlayedMasters):
        def report(self, host: str, secret: str) -> MasterReport:
            assert hang.wait(120)
            raise EverstepError("dead")

    with ThreadPoolExecutor(2) as threads:
        bench = Bench(masters=Dead(), run=threads.submit)
        try:
            bench.submit()
            until(lambda: bench.phase() == "Running", bench.why)
            bench.submit("k")
            until(lambda: bench.phase("k") == "Running", bench.why)
        finally:
            hang.set()
            bench.close()


def test_work_is_done_once_and_failures_wait_longer() -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    queue.put(("a", "b"))
    queue.put(("a", "b"), 5.0)
    assert queue.take(0) == ("a", "b") and queue.take(0) is None
    for wait_s in (1.0, 2.0, 4.0):
        queue.failed(("a", "b"))
        now[0] += wait_s - 0.1
        assert queue.take(0) is None
        now[0] += 0.2
        assert queue.take(0) == ("a", "b")


def lease(holder: str, version: int) -> Object:
    return {"metadata": {"resourceVersion": str(version)}, "spec": {"holderIdentity": holder}}


def test_a_lease_is_free_when_it_has_not_changed_for_its_duration() -> None:
    watch = LeaseWatch()
    assert watch.is_free(lease("me", 1), "me", 0.0) and watch.is_free(lease("", 2), "me", 0.0)
    assert not watch.is_free(lease("other", 3), "me", 1.0)
    assert not watch.is_free(lease("other", 4), "me", 1.0 + DURATION_S), "it was renewed"
    assert watch.is_free(lease("other", 4), "me", 2.0 + 2 * DURATION_S)


# ------------------------------------------------------------ the command line


@pytest.fixture
def at_server(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    kubeconfig_for(bench.http.url, tmp_path / "kubeconfig", NS)
    text = (tmp_path / "kubeconfig").read_text().replace("token: demo", "token: operator")
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return bench


def everstep(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        assert isinstance(done.exception, EverstepError), done.exception
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.output


def test_a_pipeline_of_everstep_run_is_one_in_a_cluster(at_server: Bench, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: gpt\nscript: train.py\nmode: pipeline\nstages: 4\nworkers: 2\ncopy_every: '10'\n")
    code, text = everstep("submit", str(file), "--image", "train:1")
    assert code == 0, text
    stored = at_server.job("gpt")["spec"]
    assert (stored["mode"], stored["stages"], stored["settings"]) == ("Pipeline", 4, {"copy_every": "10"})
    until(lambda: at_server.phase("gpt") == "Running", at_server.why)
    (master,) = (p for p in at_server.server.store.all("pods") if name_of(p).startswith("gpt-master"))
    env = {e["name"]: e.get("value", "") for e in master["spec"]["containers"][0]["env"]}
    spec, _ = settings_of(env)
    assert (spec.mode, spec.stages, spec.workers, spec.ps, spec.copy_every) == ("pipeline", 4, 2, 0, "10")


def test_top_shows_what_the_operator_wrote(at_server: Bench) -> None:
    at_server.submit()
    until(lambda: at_server.phase() == "Running", at_server.why)
    code, said = everstep("top", "k8s:j", "--once")
    assert code == 0 and "nothing is known yet" in said
    members = {"member": "worker:1", "slower": "2.10x", "per sample": "3 ms", "node": "n1", "why": "cpu is busy"}
    at_server.masters.seen = {"samples": 100, "headline": "mode ps, 2 of 2 workers", "slowest": (members,)}
    until(lambda: "speed" in at_server.job()["status"], at_server.why)
    code, said = everstep("top", "k8s:j", "--once")
    head, columns, row = said.splitlines()
    assert code == 0 and head.endswith("mode ps, 2 of 2 workers") and columns.split()[:2] == ["member", "slower"]
    assert row.split() == ["worker:1", "2.10x", "3", "ms", "n1", "cpu", "is", "busy"]
    assert json.loads(everstep("top", "k8s:j", "--json")[1])["members"] == [members]


def test_submit_status_scale_explain_and_logs(at_server: Bench, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: flights\nscript: train.py\nworkers: 2\nps: 2\nmax_workers: 4\nlease_s: 60\nparity: 1+1\n")
    code, text = everstep("submit", str(file), "--image", "train:1")
    assert code == 0 and "elasticjob/flights created in default" in text, text
    until(lambda: at_server.phase("flights") == "Running", at_server.why)
    stored = at_server.job("flights")
    assert stored["spec"]["settings"] == {"lease_s": 60.0} and stored["spec"]["worker"]["maxReplicas"] == 4
    assert stored["spec"]["psProtection"] == {"strategy": "Parity", "dataShards": 1, "parityShards": 1}
    code, text = everstep("status", "k8s:flights")
    assert code == 0 and "Running" in text and "worker: 2 of 2 ready" in text, text
    code, text = everstep("scale", "k8s:default/flights", "--workers", "3")
    assert code == 0 and "3 workers wanted" in text, text
    until(lambda: len(at_server.server.store.all("pods", NS)) == 6, at_server.why)
    code, text = everstep("scale", "k8s:flights", "--workers", "9")
    assert code == 2 and "above maxReplicas" in text, text
    assert everstep("explain", "k8s:flights")[0] == 0


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("wrokers: 2", ["--image", "x"], "workers"),
        ("script: train.py\nworkers: 2", [], "give --image"),
        ("script: train.py\nstages: 2", ["--image", "x"], "needs mode: pipeline"),
        ("script: train.py\nmode: pipeline\nps: 2", ["--image", "x"], "not in mode pipeline"),
        ("{", ["--image", "x"], ""),
        ("kind: ElasticJob\napiVersion: train.example.com/v1", [], "expected everstep.io/v1alpha1"),
        ("kind: ElasticJob\napiVersion: everstep.io/v1alpha1", [], "needs metadata and spec"),
        ("script: train.py\nname: " + "x" * 60, ["--image", "x"], "at most 40 characters"),
        ("script: train.py", ["--image", "x", "--namespace", "absent"], "absent"),
        ("script: train.py", ["--image", "x", "--context", "absent"], "Context 'absent' not found"),
    ],
)
def test_a_job_that_cannot_be_is_one_line(
    at_server: Bench, tmp_path: Path, text: str, flags: list[str], words: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    code, said = everstep("submit", str(file), *flags)
    assert code in (2, 4) and words in said and "\n" not in said.strip(), said


def test_two_jobs_of_one_name(at_server: Bench, tmp_path: Path) -> None:
    """The second one is not taken for a change of the first."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("name: flights\nscript: train.py\nworkers: 2\nps: 2\n")
    second.write_text("name: flights\nscript: other.py\nworkers: 2\nps: 2\n")
    assert everstep("submit", str(first), "--image", "train:1")[0] == 0
    until(lambda: at_server.phase("flights") == "Running", at_server.why)
    code, said = everstep("submit", str(second), "--image", "train:1")
    assert code in (2, 4) and "script" in said and "\n" not in said.strip(), said
    assert at_server.job("flights")["spec"]["script"] == "train.py"
    code, said = everstep("submit", str(first), "--image", "train:1")
    assert code == 0, said


def test_a_cluster_without_the_resources_of_everstep_is_one_line(at_server: Bench, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("script: train.py\n")
    at_server.operator.close()
    at_server.server.delete(at_server.server.of(CRDS), "", "elasticjobs.everstep.io")
    code, said = everstep("submit", str(file), "--image", "train:1")
    assert code in (2, 4) and "\n" not in said.strip(), said
    assert "everstep crd print" in said, said


def older_crd(server: ApiServer, *paths: str) -> None:
    """Have the cluster know ElasticJob as an earlier version did, without some fields."""
    crds = server.of(CRDS)
    server.delete(crds, "", "elasticjobs.everstep.io")
    old = copy.deepcopy(definitions()[0])
    for path in paths:
        *above, name = path.split(".")
        schema = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for step in above:
            schema = schema["properties"][step]
        del schema["properties"][name]
        schema.pop("x-kubernetes-validations", None)
    server.create(crds, "", old)


def test_fields_that_the_cluster_would_drop_are_refused(at_server: Bench, tmp_path: Path) -> None:
    at_server.operator.close()
    file = tmp_path / "job.yaml"
    head = "apiVersion: everstep.io/v1alpha1\nkind: ElasticJob\nmetadata: {name: a}\nspec:\n  script: train.py\n"
    worker = "  worker: {template: {spec: {containers: [{name: main, image: x}]}}}\n"
    file.write_text(f"{head}{worker}  elasticity: {{maxWait: 5}}\n")
    code, said = everstep("submit", str(file))
    assert code == 2 and "spec.elasticity.maxWait: an ElasticJob has no such field" in said, said
    older_crd(at_server.server, "spec.stages")
    file.write_text(f"{head}{worker}  mode: Pipeline\n  stages: 2\n")
    code, said = everstep("submit", str(file))
    assert code == 2 and said.startswith("spec.stages: the cluster's CRDs are of another version"), said
    assert "everstep crd print | kubectl apply -f -" in said and "\n" not in said.strip()
    assert not at_server.server.store.all("elasticjobs"), "nothing was made of half a job"


def test_an_operator_works_with_crds_of_an_older_version(bench: Bench) -> None:
    """What they do not keep is said once, and not written again and again."""
    older_crd(bench.server, "status.cost", "status.master.restarts")
    bench.submit(worker={**PRICED, "replicas": 2, "minReplicas": 1, "maxReplicas": 4})
    until(lambda: bench.phase() == "Running", bench.why)
    until(lambda: any("status.cost" in line for line in bench.lines), bench.why)
    bench.operator.close()
    bench._thread.join(60)
    for _ in range(3):  # (what the last look left to do)
        bench.operator.look((NS, "j"))
    writes = bench.server.store.writes
    for _ in range(12):
        bench.operator.look((NS, "j"))
    assert bench.server.store.writes == writes
    told = [line for line in bench.lines if "CRDs are of another version" in line]
    assert "status.master.restarts" in " ".join(told) and len(told) <= 2, told


def test_what_is_edited_by_hand_is_put_right_or_followed(bench: Bench) -> None:
    """A pod that lost its labels is none of the job's any more: another one fills its slot. It goes with the job."""
    bench.submit()
    until(lambda: bench.phase() == "Running", bench.why)
    pods, store = bench.server.of("pods"), bench.server.store
    bench.server.merge(pods, NS, "j-worker-0-3", {"metadata": {"labels": None}})
    until(lambda: store.get("pods", NS, "j-worker-0-5"), bench.why)
    for plural, name in (("secrets", "j-secret"), ("persistentvolumeclaims", "j-master")):
        bench.server.delete(bench.server.of(plural), NS, name)
    bench.operator._secrets.clear()  # (it is read anew once a minute)
    until(lambda: store.get("secrets", NS, "j-secret"), bench.why)
    until(lambda: store.get("persistentvolumeclaims", NS, "j-master"), bench.why)
    jobs = bench.server.of("elasticjobs")
    bench.server.merge(jobs, NS, "j", {"status": {"phase": "Succeeded"}})  # (status has a way of its own)
    assert bench.phase() != "Succeeded"
    with pytest.raises(RefusedRequest, match="mode is immutable"):
        bench.server.merge(jobs, NS, "j", {"spec": {"mode": "Hybrid"}})
    bench.server.merge(jobs, NS, "j", {"spec": {"worker": {"replicas": 3}}})
    until(lambda: bench.phase() == "Running" and bench.masters.told and bench.masters.told[-1][0] == 3, bench.why)
    bench.server.delete(jobs, NS, "j")
    until(lambda: not store.all("pods", NS), bench.why)


def test_names_of_jobs_that_are_not_there(at_server: Bench) -> None:
    for words in (["status", "k8s:absent"], ["scale", "k8s:absent", "--workers", "2"], ["explain", "k8s:"]):
        code, said = everstep(*words)
        assert code == 2 and "\n" not in said.strip(), said


def test_nothing_but_the_verbs_of_clusters_needs_the_library() -> None:
    words = "import sys; sys.modules['lightkube'] = sys.modules['cel'] = None; import everstep.cli.main"
    more = "import everstep.cli.pod, everstep.cli.cluster_job, everstep.cli.cluster_operator"
    done = subprocess.run([sys.executable, "-c", f"{words}; {more}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ask = "import sys; sys.modules['lightkube'] = None; sys.argv = ['everstep', 'status', 'k8s:x']"
    ask += "; from everstep.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=300)
    assert done.returncode == 4 and "pip install 'everstep[k8s]'" in done.stderr, done.stderr
