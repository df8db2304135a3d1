"""Metadata services on the loopback that answer as the vendors' pages say; and some that are slow, wrong or flap."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from everstep.errors import PlatformError
from everstep.model.notice import Certainty
from everstep.platforms.clouds import Alibaba, Aws, Azure, Gcp

Answer = tuple[int, str]
NOON, NOON_S = "2026-01-31T12:00:00Z", 1769860800.0


class Service:
    """``answer(method, path, headers)`` is what the next requests get. ``asked``: what came."""

    def __init__(self) -> None:
        self.answer: Callable[[str, str, dict[str, str]], Answer] = lambda *_: (404, "")
        self.etag = ""
        self.asked: list[tuple[str, str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.asked.append((self.command, self.path))
                headers = {k.lower(): v for k, v in self.headers.items()}
                code, text = service.answer(self.command, self.path, headers)
                try:
                    self.send_response(code)
                    if service.etag:
                        self.send_header("ETag", service.etag)
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    self.wfile.write(text.encode())
                except OSError:
                    pass  # whoever asked waits no longer

            do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


# ------------------------------------------------------------ AWS


class WithTokens:
    """IMDSv2, as https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html has it: PUT with
    a lifetime gives a token, GET without a good one is 401."""

    def __init__(self, header: str, pages: dict[str, Answer]) -> None:
        self.header, self.pages, self.token, self.given = header, pages, "t1", 0

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if path == "/latest/api/token":
            if method != "PUT" or not 1 <= int(headers.get(f"{self.header}-ttl-seconds", "0")) <= 21600:
                return 400, ""
            self.given += 1
            return 200, self.token
        if headers.get(self.header) != self.token:
            return 401, "<html>401 - Unauthorized</html>"
        return self.pages.get(path, (404, "<html>404 - Not Found</html>"))


ACTION, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"


def test_aws(service: Service) -> None:
    answers = WithTokens("x-aws-ec2-metadata-token", {})
    service.answer = answers
    source = Aws(service.url)
    assert source.look() == () == source.look()
    assert answers.given == 1
    answers.pages[REBALANCE] = 200, json.dumps({"noticeTime": NOON})
    (found,) = source.look()
    assert found.certainty is Certainty.LIKELY and NOON in found.key
    answers.pages[ACTION] = 200, json.dumps({"action": "terminate", "time": NOON})
    answers.token = "t2"  # the old one has expired
    found, risk = source.look()
    assert (found.at, found.certainty, risk.certainty) == (NOON_S, Certainty.CERTAIN, Certainty.LIKELY)
    assert "terminate" in found.what and answers.given == 2


def test_aws_of_the_first_version_has_no_tokens(service: Service) -> None:
    pages = {ACTION: (200, json.dumps({"action": "stop", "time": NOON}))}
    service.answer = lambda method, path, _: (405, "") if method == "PUT" else pages.get(path, (404, ""))
    assert [n.at for n in Aws(service.url).look()] == [NOON_S]


@pytest.mark.parametrize(
    "page",
    [
        (200, "<html>a proxy's page</html>"),
        (200, "[]"),
        (200, json.dumps({"action": "dance", "time": NOON})),
        (200, json.dumps({"action": "terminate", "time": "soon"})),
        (200, json.dumps({"action": "terminate"})),
        (500, "oops"),
        (302, ""),
        (200, "x" * 100_000),
    ],
    ids=["html", "list", "action", "time", "no time", "500", "elsewhere", "long"],
)
def test_aws_that_lies_is_one_line(service: Service, page: Answer) -> None:
    service.answer = WithTokens("x-aws-ec2-metadata-token", {ACTION: page})
    with pytest.raises(PlatformError) as caught:
        Aws(service.url).look()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_a_token_that_is_never_good(service: Service) -> None:
    service.answer = lambda method, *_: (200, "t") if method == "PUT" else (401, "")
    with pytest.raises(PlatformError, match="answered 401"):
        Aws(service.url).look()


# ------------------------------------------------------------ GCP


def google(pages: dict[str, str]) -> Callable[[str, str, dict[str, str]], Answer]:
    """https://cloud.google.com/compute/docs/metadata/querying-metadata: without Metadata-Flavor: Google it is 403."""

    def answer(_: str, path: str, headers: dict[str, str]) -> Answer:
        if headers.get("metadata-flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header."
        name = path.rpartition("/")[2]
        return (200, pages[name]) if name in pages else (404, "")

    return answer


def test_gcp(service: Service) -> None:
    pages = {"preempted": "FALSE", "maintenance-event": "NONE"}
    service.answer, service.etag = google(pages), "e1"
    source = Gcp(service.url)
    assert source.look() == ()
    pages["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert [n.certainty for n in source.look()] == [Certainty.LIKELY]
    pages["maintenance-event"], pages["preempted"], service.etag = "NONE", "TRUE", "e2"
    before = time.time()
    (found,) = source.look()
    assert found.at is not None and before + 30 <= found.at <= time.time() + 30
    assert source.look()[0].at == found.at  # 30 s from when it was first said
    pages["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert [n.certainty for n in source.look()] == [Certainty.CERTAIN] * 2
    del pages["maintenance-event"]
    assert len(source.look()) == 1


def test_gcp_that_lies(service: Service) -> None:
    for pages in ({"preempted": "MAYBE"}, {"preempted": "<html>"}, {"preempted": "FALSE", "maintenance-event": "X"}):
        service.answer = google(pages)
        with pytest.raises(PlatformError, match="answered 200"):
            Gcp(service.url).look()


# ------------------------------------------------------------ Azure


def event(kind: str, **other: object) -> dict[str, object]:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_0", "vm_1"],
        "EventStatus": "Scheduled",
        "NotBefore": "Sat, 31 Jan 2026 12:00:00 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **other,
    }


def azure(events: list[dict[str, object]], name: str = "vm_0") -> Callable[[str, str, dict[str, str]], Answer]:
    """https://learn.microsoft.com/en-us/azure/virtual-machines/linux/scheduled-events: requests need Metadata: true."""

    def answer(_: str, path: str, headers: dict[str, str]) -> Answer:
        if headers.get("metadata") != "true" or "api-version=" not in path:
            return 400, "Bad request. Required metadata header not specified"
        if path.startswith("/metadata/instance/compute/name"):
            return 200, name
        return 200, json.dumps({"DocumentIncarnation": 2, "Events": events})

    return answer


def test_azure(service: Service) -> None:
    events: list[dict[str, object]] = []
    service.answer = azure(events)
    source = Azure(service.url)
    assert source.look() == ()
    events.append(event("Freeze"))
    assert [n.certainty for n in source.look()] == [Certainty.LIKELY]
    events[0] = event("Preempt")
    (found,) = source.look()
    assert (found.at, found.certainty) == (NOON_S, Certainty.CERTAIN)
    events[0] = event("Preempt", EventStatus="Started", NotBefore="")
    first = source.look()[0].at
    assert first is not None and abs(first - time.time()) < 60 and source.look()[0].at == first
    events[0] = event("Preempt", EventStatus="Canceled")
    assert source.look() == ()
    events[0] = event("Preempt", Resources=["vm_1"])
    assert source.look() == ()


def test_azure_that_lies(service: Service) -> None:
    for body in ("<html>", "{}", '{"Events": {}}', '{"Events": [3]}', "[]"):
        service.answer = lambda _m, path, _h, body=body: (200, "vm_0" if "compute/name" in path else body)
        with pytest.raises(PlatformError, match="answered 200"):
            Azure(service.url).look()
    service.answer = lambda *_: (200, "<html>a portal</html>")
    with pytest.raises(PlatformError, match="answered 200"):
        Azure(service.url).look()


# ------------------------------------------------------------ Alibaba


def test_alibaba(service: Service) -> None:
    answers = WithTokens("x-aliyun-ecs-metadata-token", {})
    service.answer = answers
    source = Alibaba(service.url)
    assert source.look() == ()
    answers.pages["/latest/meta-data/instance/spot/termination-time"] = 200, NOON
    (found,) = source.look()
    assert (found.at, found.certainty) == (NOON_S, Certainty.CERTAIN)
    answers.pages["/latest/meta-data/instance/spot/termination-time"] = 200, "<html>"
    with pytest.raises(PlatformError, match="answered 200"):
        source.look()


# ------------------------------------------------------------ all


@pytest.mark.parametrize("make", [Aws, Gcp, Azure, Alibaba])
def test_nobody_there_slow_and_talking_forever(service: Service, make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.platforms import clouds

    with pytest.raises(PlatformError, match="does not answer"):
        make("http://127.0.0.1:1").look()
    monkeypatch.setattr(clouds, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(clouds.Metadata.ask, "__defaults__", ({}, "GET", 0.2))
    over = threading.Event()
    service.answer = lambda *_: (over.wait(30), (404, ""))[1]
    try:
        with pytest.raises(PlatformError, match="does not answer: timed out"):
            make(service.url).look()
    finally:
        over.set()
