"""Word that this node goes away, from wherever it comes: sources are asked side by side, and events counted once.

A source is asked every few seconds in a thread of its own, so that one that hangs hides no other. ``NoticeLedger`` is
pure: it knows which events are open, and says what has changed. A source that fails is asked again, at longer and
longer intervals, and is told of once for each kind of failure.

Sources by name, for ``--notices`` (several with commas): ``aws``, ``gcp``, ``azure``, ``alibaba`` (see ``clouds``),
``file:PATH`` and ``command:WORDS``.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from everstep.config.notices import parse_notices
from everstep.errors import PlatformError
from everstep.model.notice import Certainty, Notice
from everstep.net.retry import backoff
from everstep.platforms.commands import run_command

DESIGN_LEAD_S: Final = 15.0
"""The shortest time that a platform with notices gives (GKE); what is assumed where nobody says when."""
TEXT_MAX_BYTES: Final = 64 << 10
_BACK_OFF_MAX_S: Final = 60.0
_GONE_LOOKS: Final = 2  # so often in a row an event is not there before it is over


class NoticeSource(Protocol):
    """Is where notices come from."""

    name: str
    every_s: float

    def look(self) -> tuple[Notice, ...]:
        """Return the events that are open now. May take some seconds. Raises PlatformError with one line."""
        ...


class Change(NamedTuple):
    """``notice`` has come (or says an earlier time than before); or is over, if ``over``: the node stays."""

    notice: Notice
    over: bool = False


class NoticeLedger:
    """Knows which events are open. Pure. ``known``: an event that is no news for as long as it is open."""

    def __init__(self, known: Notice | None = None) -> None:
        self._known = (known.source, known.key) if known is not None else None
        self._open: dict[tuple[str, str], Notice] = {}
        self._missing: dict[tuple[str, str], int] = {}

    def __repr__(self) -> str:
        return f"<{len(self._open)} notices>"

    def looked(self, source: str, found: Sequence[Notice]) -> list[Change]:
        """``source`` says that ``found`` is what is open. What that changes."""
        out: list[Change] = []
        here = {(source, n.key): n for n in found}
        if self._known is not None and self._known[0] == source and self._known not in here:
            self._missing[self._known] = self._missing.get(self._known, 0) + 1
            if self._missing[self._known] >= _GONE_LOOKS:
                self._missing.pop(self._known)
                self._known = None
        for at, notice in here.items():
            self._missing.pop(at, None)
            if at == self._known:
                continue
            if _is_news(self._open.get(at), notice):
                self._open[at] = notice
                out.append(Change(notice))
        for at in [at for at in self._open if at[0] == source and at not in here]:
            self._missing[at] = self._missing.get(at, 0) + 1
            if self._missing[at] >= _GONE_LOOKS:
                del self._missing[at]
                out.append(Change(self._open.pop(at), over=True))
        return out

    def certain(self) -> list[Notice]:
        """Open events by which the node goes; the earliest first, those without a time before all."""
        certain = [n for n in self._open.values() if n.certainty is Certainty.CERTAIN]
        return sorted(certain, key=lambda n: -math.inf if n.at is None else n.at)


def _is_news(known: Notice | None, now: Notice) -> bool:
    """A later time is none: what has begun goes on."""
    if known is None or known.certainty is not now.certainty:
        return True
    return now.at is not None and known.at is not None and now.at < known.at - 1.0


class NoticeWatch:
    """Asks sources. ``changed`` is called on a source's thread with each change, ``say`` with lines for people.
    ``known``: see ``NoticeLedger``."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        changed: Callable[[Change], None],
        say: Callable[[str], None],
        known: Notice | None = None,
    ) -> None:
        self.sources, self._changed, self._say = tuple(sources), changed, say
        self._answers: dict[str, int] = {}
        self._ledger = NoticeLedger(known)
        self._lock = threading.Lock()
        self._over = threading.Event()

    def __repr__(self) -> str:
        return f"<notices from {', '.join(s.name for s in self.sources) or 'nobody'}>"

    def start(self) -> None:
        for source in self.sources:
            threading.Thread(target=self._ask, args=(source,), name=f"notices-{source.name}", daemon=True).start()

    def close(self) -> None:
        """Do nothing: threads end by themselves, soon."""
        self._over.set()

    def certain(self) -> list[Notice]:
        """Do as ``NoticeLedger.certain``."""
        with self._lock:
            return self._ledger.certain()

    def asked_all(self) -> bool:
        """Return whether every source has answered so often that what was said before this began would be over."""
        with self._lock:
            return all(self._answers.get(s.name, 0) >= _GONE_LOOKS for s in self.sources)

    def _ask(self, source: NoticeSource) -> None:
        waits, last = _after_failures(source), ""
        while not self._over.is_set():
            try:
                found = source.look()
            except PlatformError as error:
                if str(error) != last:
                    last = str(error)
                    self._say(f"notices from {source.name}: {last}; it is asked again")
                wait_s = next(waits)
            else:
                if last:
                    self._say(f"notices from {source.name}: it answers again")
                waits, wait_s, last = _after_failures(source), source.every_s, ""
                with self._lock:
                    self._answers[source.name] = self._answers.get(source.name, 0) + 1
                    changes = self._ledger.looked(source.name, found)
                for change in changes:
                    if not self._over.is_set():
                        self._changed(change)
            self._over.wait(wait_s)


def _after_failures(source: NoticeSource) -> Iterator[float]:
    return backoff(2 * source.every_s, _BACK_OFF_MAX_S, spread=0.0, at_once=False)


# ------------------------------------------------------------ times


def time_of(text: str) -> float:
    """Return seconds since 1970 of a time as ISO 8601 or RFC 1123 has it, in UTC where it names no zone; of a number,
    that many seconds from now. Raises PlatformError."""
    text = text.strip()
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if not 0 <= seconds <= 86400 * 366:
            raise PlatformError(f"{text} seconds from now is no time: give 0 to a year")
        return time.time() + seconds
    for read in (datetime.datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError, TypeError):
            at = read(text)
            return (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()
    raise PlatformError(f"{text[:80]!r} is no time: expected one like 2026-01-31T12:00:00Z")


# ------------------------------------------------------------ sources of this machine


class FileSource:
    """Watches a file whose being there says that the node goes; it may have a time (ISO 8601, or seconds from when it
    was written). A file that is written again is another event."""

    every_s = 0.25

    def __init__(self, path: Path) -> None:
        self.name, self._path = f"file:{path}", path

    def look(self) -> tuple[Notice, ...]:
        try:
            written = self._path.stat().st_mtime
            with self._path.open("rb") as file:
                text = file.read(TEXT_MAX_BYTES).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise PlatformError(f"cannot be read: {error.strerror or error}") from None
        at = None
        if text:
            try:
                at = written + float(text) if _is_number(text) else time_of(text)
            except PlatformError:
                at = None  # a file that is there says enough
        return (Notice(self.name, f"{self._path} of {written:.3f}", f"{self._path} is there", at),)


class _CommandAnswer(msgspec.Struct, forbid_unknown_fields=True):
    at: float | str | None = None
    what: str = ""
    key: str = ""
    certainty: Certainty = Certainty.CERTAIN


_ANSWER = msgspec.json.Decoder(_CommandAnswer)


class CommandSource:
    """Asks a command of the user. Exit 0 with a line: the node goes (a time, or JSON with ``at``, ``what``, ``key`` and
    ``certainty``); exit 0 without, or 1: it stays. Anything else is a failure."""

    every_s = 5.0
    limit_s = 10.0

    def __init__(self, words: str) -> None:
        self._argv = shlex.split(words)
        self.name = f"command:{self._argv[0]}"

    def look(self) -> tuple[Notice, ...]:
        code, text = run_command(self._argv, self.limit_s, TEXT_MAX_BYTES)
        text = text.partition("\n")[0]
        if code not in (0, 1):
            raise PlatformError(f"exit code {code}; 0 with a line means that the node goes, 1 that it stays")
        if code == 1 or not text:
            return ()
        if text.startswith("{"):
            try:
                answer = _ANSWER.decode(text)
            except msgspec.DecodeError as error:
                raise PlatformError(f"its line is not what was expected: {error}") from None
            at = answer.at if not isinstance(answer.at, str) else time_of(answer.at)
            return (Notice(self.name, answer.key or self.name, answer.what or "it says so", at, answer.certainty),)
        return (Notice(self.name, self.name, "it says so", time_of(text)),)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False


# ------------------------------------------------------------ by name


def sources_of(text: str, where: str = "--notices") -> tuple[NoticeSource, ...]:
    """Return sources by their names, with commas. ``where``: what the ConfigError, which it raises, names."""
    from everstep.platforms.clouds import SOURCES

    out: list[NoticeSource] = []
    for kind, rest in parse_notices(text, where):
        if kind == "file":
            out.append(FileSource(Path(rest)))
        elif kind == "command":
            out.append(CommandSource(rest))
        else:
            out.append(SOURCES[kind](rest) if rest else SOURCES[kind]())
    return tuple(out)
