"""Notices from the metadata services of clouds: a node asks its own machine's, by HTTP on a link-local address.

What each answers, and how long before a machine goes, is its vendor's documentation, named at each class. No proxy is
used, no redirection followed, no more than some KB read: what answers there may be another machine's.
"""

from __future__ import annotations

import http.client
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from everstep.errors import ConfigError, PlatformError
from everstep.model.notice import Certainty, Notice
from everstep.platforms.notices import TEXT_MAX_BYTES, NoticeSource, time_of

_TIMEOUT_S: Final = 3.0
_TOKEN_S: Final = 21600
_JSON = msgspec.json.Decoder()


class MetadataPage(NamedTuple):
    status: int
    text: str
    etag: str = ""


class Metadata:
    """Is a metadata service at ``base``, such as ``http://169.254.169.254``."""

    def __init__(self, base: str) -> None:
        parts = urllib.parse.urlsplit(base)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"{base!r} is no metadata service: expected one like http://169.254.169.254")
        self._host, self._port = parts.hostname, parts.port or 80

    def ask(
        self, path: str, headers: Mapping[str, str] = {}, method: str = "GET", timeout_s: float = _TIMEOUT_S
    ) -> MetadataPage:
        """Make one request. Raises PlatformError where nothing, or nonsense, answers."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            raw = answer.read(TEXT_MAX_BYTES + 1)
            etag = answer.headers.get("ETag", "")
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise PlatformError(f"{self._host}:{self._port} does not answer: {why}") from None
        finally:
            connection.close()
        if len(raw) > TEXT_MAX_BYTES:
            raise PlatformError(f"{self._host}:{self._port}{path} answers more than {TEXT_MAX_BYTES >> 10} KB")
        return MetadataPage(answer.status, raw.decode("utf-8", "replace").strip(), etag)

    def wrong(self, path: str, page: MetadataPage) -> PlatformError:
        """Return the error for an answer that says neither yes nor no."""
        return PlatformError(f"{self._host}:{self._port}{path} answered {page.status} {page.text[:60]!r}")

    def object(self, path: str, page: MetadataPage) -> dict[str, Any]:
        """Return the JSON object that the page is. Raises PlatformError."""
        try:
            found = _JSON.decode(page.text)
        except msgspec.DecodeError:
            raise self.wrong(path, page) from None
        if not isinstance(found, dict):
            raise self.wrong(path, page)
        return found


class _WithToken(Metadata):
    """A service that wants a token: it is asked for with PUT, and again when it is refused."""

    def __init__(self, base: str, token_path: str, header: str) -> None:
        super().__init__(base)
        self._token_path, self._header = token_path, header
        self._token, self._until = "", 0.0

    def page(self, path: str) -> MetadataPage | None:
        """None: there is none (404). Raises PlatformError for any other answer than a page."""
        for _ in range(2):
            if not self._token or time.monotonic() > self._until:
                self._renew()
            page = self.ask(path, {self._header: self._token} if self._token else {})
            if page.status != 401:
                break
            self._token = ""
        if page.status not in (200, 404):
            raise self.wrong(path, page)
        return page if page.status == 200 else None

    def _renew(self) -> None:
        page = self.ask(self._token_path, {f"{self._header}-ttl-seconds": str(_TOKEN_S)}, "PUT")
        if page.status in (403, 404, 405):  # a service of the first version has no tokens
            self._token, self._until = "", time.monotonic() + _TOKEN_S
            return
        if page.status != 200 or not page.text or not page.text.isascii() or any(c.isspace() for c in page.text):
            raise self.wrong(self._token_path, page)
        self._token, self._until = page.text, time.monotonic() + 0.9 * _TOKEN_S


class Aws:
    """Asks for the interruption of spot instances, two minutes ahead, and before it, perhaps, a recommendation to
    rebalance.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html (asks for a look every
    5 s), .../rebalance-recommendations.html, .../instancedata-data-retrieval.html (IMDSv2: tokens)."""

    name, every_s = "aws", 5.0
    _ACTION = "/latest/meta-data/spot/instance-action"
    _REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._service = _WithToken(base, "/latest/api/token", "X-aws-ec2-metadata-token")

    def look(self) -> tuple[Notice, ...]:
        out: list[Notice] = []
        if (page := self._service.page(self._ACTION)) is not None:
            found = self._service.object(self._ACTION, page)
            action = str(found.get("action", ""))
            if action not in ("terminate", "stop", "hibernate") or not isinstance(found.get("time"), str):
                raise self._service.wrong(self._ACTION, page)
            out.append(Notice(self.name, "instance-action", f"the spot instance: {action}", time_of(found["time"])))
        if (page := self._service.page(self._REBALANCE)) is not None:
            value = str(self._service.object(self._REBALANCE, page).get("noticeTime", ""))
            what = "the spot instance is at a higher risk of interruption"
            out.append(Notice(self.name, f"rebalance {value}", what, None, Certainty.LIKELY))
        return tuple(out)


class Gcp:
    """Asks for preemption, 30 s ahead, and host maintenance, 60 s ahead.

    https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted,
    .../docs/metadata/getting-live-migration-notice, .../docs/metadata/querying-metadata (ETag, wait_for_change)."""

    name, every_s = "gcp", 1.0
    _PREEMPTED = "/computeMetadata/v1/instance/preempted"
    _MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
    _LEAD_S, _MAINTENANCE_LEAD_S = 30.0, 60.0

    def __init__(self, base: str = "http://metadata.google.internal") -> None:
        self._service = Metadata(base)
        self._since: dict[str, tuple[str, float]] = {}  # path -> ETag of what it says, and when that was first seen

    def _page(self, path: str, known: tuple[str, ...]) -> tuple[str, float]:
        page = self._service.ask(path, {"Metadata-Flavor": "Google"})
        if page.status == 404:  # a machine whose type has none
            return known[0], 0.0
        if page.status != 200 or page.text.upper() not in known:
            raise self._service.wrong(path, page)
        mark = page.etag or page.text
        if self._since.get(path, ("",))[0] != mark:
            self._since[path] = mark, time.time()
        return page.text.upper(), self._since[path][1]

    def look(self) -> tuple[Notice, ...]:
        out: list[Notice] = []
        value, since = self._page(self._PREEMPTED, ("FALSE", "TRUE"))
        if value == "TRUE":
            out.append(Notice(self.name, "preempted", "the instance is preempted", since + self._LEAD_S))
        known = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE")
        value, since = self._page(self._MAINTENANCE, known)
        if value == "TERMINATE_ON_HOST_MAINTENANCE":
            out.append(Notice(self.name, "maintenance", "the host is maintained", since + self._MAINTENANCE_LEAD_S))
        elif value == "MIGRATE_ON_HOST_MAINTENANCE":
            what = "the instance moves to another host, and stands still meanwhile"
            out.append(Notice(self.name, "maintenance", what, since + self._MAINTENANCE_LEAD_S, Certainty.LIKELY))
        return tuple(out)


class Azure:
    """Asks for Scheduled Events of this virtual machine: Preempt (spot, at least 30 s ahead), Terminate, Redeploy,
    Reboot; a Freeze is a pause of some seconds.

    https://learn.microsoft.com/en-us/azure/virtual-machines/linux/scheduled-events (the first request may take two
    minutes; NotBefore is empty for an event that has begun), .../instance-metadata-service."""

    name, every_s = "azure", 1.0
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _FIRST_S = 130.0
    _GOES = ("Preempt", "Terminate", "Redeploy", "Reboot")

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._service = Metadata(base)
        self._mine = ""
        self._asked = False
        self._began: dict[str, float] = {}

    def look(self) -> tuple[Notice, ...]:
        header = {"Metadata": "true"}
        if not self._mine:
            page = self._service.ask(self._NAME, header)
            if page.status != 200 or not page.text or len(page.text) > 256 or "<" in page.text:
                raise self._service.wrong(self._NAME, page)
            self._mine = page.text
        page = self._service.ask(self._EVENTS, header, timeout_s=_TIMEOUT_S if self._asked else self._FIRST_S)
        self._asked = True
        if page.status != 200:
            raise self._service.wrong(self._EVENTS, page)
        events = self._service.object(self._EVENTS, page).get("Events")
        if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
            raise self._service.wrong(self._EVENTS, page)
        return tuple(n for e in events if (n := self._notice(e)) is not None)

    def _notice(self, event: dict[str, Any]) -> Notice | None:
        resources, kind, number = event.get("Resources"), str(event.get("EventType", "")), str(event.get("EventId", ""))
        if not isinstance(resources, list) or self._mine not in resources:
            return None  # another machine of the same set
        if str(event.get("EventStatus", "")) in ("Completed", "Canceled"):
            return None
        value = event.get("NotBefore")
        at = time_of(value) if isinstance(value, str) and value else self._began.setdefault(number, time.time())
        what = f"scheduled event {kind} of {self._mine}"
        return Notice(self.name, number, what, at, Certainty.CERTAIN if kind in self._GOES else Certainty.LIKELY)


class Alibaba:
    """Release of spot instances, five minutes ahead.

    https://www.alibabacloud.com/help/en/ecs/user-guide/query-the-interruption-events-of-preemptible-instances,
    .../view-instance-metadata (tokens); the time is in UTC, 404 where there is none."""

    name, every_s = "alibaba", 5.0
    _TIME = "/latest/meta-data/instance/spot/termination-time"

    def __init__(self, base: str = "http://100.100.100.200") -> None:
        self._service = _WithToken(base, "/latest/api/token", "X-aliyun-ecs-metadata-token")

    def look(self) -> tuple[Notice, ...]:
        page = self._service.page(self._TIME)
        if page is None:
            return ()
        if not page.text[:4].isdigit():
            raise self._service.wrong(self._TIME, page)
        return (Notice(self.name, "termination-time", "the spot instance is released", time_of(page.text)),)


SOURCES: Final[dict[str, Callable[..., NoticeSource]]] = {"aws": Aws, "gcp": Gcp, "azure": Azure, "alibaba": Alibaba}
