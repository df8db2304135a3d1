"""Word that a node goes away: what is news, what is over, and sources that fail, lie or hang."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.config.notices import parse_notices
from everstep.errors import ConfigError, PlatformError
from everstep.model.notice import Certainty, Notice
from everstep.platforms.notices import Change, CommandSource, FileSource, NoticeLedger, NoticeWatch, sources_of, time_of


def notice(key: str = "k", at: float | None = 100.0, certainty: Certainty = Certainty.CERTAIN) -> Notice:
    return Notice("s", key, "it goes", at, certainty)


def test_an_event_is_news_once_and_again_when_it_comes_earlier_or_is_certain() -> None:
    ledger = NoticeLedger()
    likely = notice(certainty=Certainty.LIKELY)
    assert ledger.looked("s", [likely]) == [Change(likely)]
    assert ledger.looked("s", [likely]) == []
    assert ledger.certain() == []
    sure = notice()
    assert ledger.looked("s", [sure]) == [Change(sure)]
    assert ledger.looked("s", [notice(at=160.0)]) == []  # later: what has begun goes on
    assert ledger.looked("s", [notice(at=50.0)]) == [Change(notice(at=50.0))]
    assert ledger.certain() == [notice(at=50.0)]


def test_an_event_that_flickers_is_not_over() -> None:
    ledger = NoticeLedger()
    ledger.looked("s", [notice()])
    for _ in range(3):
        assert ledger.looked("s", []) == []
        assert ledger.looked("s", [notice()]) == []
    assert ledger.looked("s", []) == []
    assert ledger.looked("other", []) == []
    assert ledger.looked("s", []) == [Change(notice(), over=True)]
    assert ledger.certain() == []


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 200)), max_size=4), max_size=20))
def test_what_is_open_is_what_was_said_last(looks: list[list[tuple[str, int]]]) -> None:
    ledger = NoticeLedger()
    open_now: set[str] = set()
    for look in looks:
        found = [notice(key, float(at)) for key, at in dict(look).items()]
        for change in ledger.looked("s", found):
            (open_now.discard if change.over else open_now.add)(change.notice.key)
        assert {n.key for n in ledger.certain()} == open_now >= {n.key for n in found}


def test_an_event_that_was_wrong_is_no_news_until_it_was_away() -> None:
    wrong = Notice("s", "k", "it goes", 100.0)
    ledger, later = NoticeLedger(wrong), msgspec.structs.replace(wrong, at=50.0)
    assert ledger.looked("s", [wrong]) == ledger.looked("s", [later]) == [] == ledger.certain()
    other = Notice("s", "other", "it goes", 200.0)
    assert ledger.looked("s", [wrong, other]) == [Change(other)]
    assert ledger.looked("t", []) == ledger.looked("s", [other]) == ledger.looked("s", [wrong, other]) == []
    for _ in range(2):
        assert ledger.looked("s", [other]) == []
    assert ledger.looked("s", [wrong, other]) == [Change(wrong)]


def test_a_file_that_is_written_again_is_another_event(tmp_path: Path) -> None:
    path = tmp_path / "going"
    path.write_text("5")
    (first,) = FileSource(path).look()
    os.utime(path, (1e9, 1e9))
    (second,) = FileSource(path).look()
    assert first.key != second.key and second.at == 1e9 + 5


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-01-31T12:00:00Z", 1769860800.0),
        ("2026-01-31T12:00:00", 1769860800.0),
        ("2026-01-31T13:00:00+01:00", 1769860800.0),
        ("Sat, 31 Jan 2026 12:00:00 GMT", 1769860800.0),
    ],
)
def test_times(text: str, at: float) -> None:
    assert time_of(text) == at


@pytest.mark.parametrize("text", ["", "soon", "-5", "1e99", "nan", "<html>", "2026-13-01T00:00:00Z"])
def test_no_times(text: str) -> None:
    with pytest.raises(PlatformError, match="is no time"):
        time_of(text)


def test_names() -> None:
    assert [s.name for s in sources_of("aws, gcp,azure,alibaba,file:/tmp/x,command:/bin/echo hello")] == [
        *("aws", "gcp", "azure", "alibaba", "file:/tmp/x", "command:/bin/echo")
    ]
    assert parse_notices("") == ()
    for wrong in ("amazon", "file:", "command:", "aws,what", "command:'open"):
        with pytest.raises(ConfigError, match=r"^--notices: ['\"]"):
            parse_notices(wrong)
    with pytest.raises(ConfigError, match="no metadata service"):
        sources_of("aws:ftp://x")


def test_a_file_that_comes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "going"
    source = FileSource(path)
    assert source.look() == ()
    path.write_text("")
    assert source.look()[0].at is None
    path.write_text("120\n")
    written = path.stat().st_mtime
    assert source.look()[0].at == written + 120
    path.write_text("2026-01-31T12:00:00Z")
    assert source.look()[0].at == 1769860800.0
    path.write_text("garbage")
    assert source.look()[0].at is None
    path.unlink()
    assert source.look() == ()
    path.mkdir()
    with pytest.raises(PlatformError, match="cannot be read"):
        source.look()


def script(tmp_path: Path, text: str) -> CommandSource:
    path = tmp_path / "notice.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return CommandSource(str(path))


def test_a_command_says_whether_the_node_goes(tmp_path: Path) -> None:
    assert script(tmp_path, "exit 1").look() == ()
    assert script(tmp_path, "exit 0").look() == ()
    said = """echo '{"at": "2026-01-31T12:00:00Z", "what": "sold", "key": "7", "certainty": "likely"}'"""
    (found,) = script(tmp_path, said).look()
    assert (found.at, found.what, found.key, found.certainty) == (1769860800.0, "sold", "7", Certainty.LIKELY)
    before = time.time()
    (found,) = script(tmp_path, "echo 30").look()
    assert found.at is not None and before + 30 <= found.at <= time.time() + 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exit 3", "exit code 3"),
        ("echo soon", "is no time"),
        ("echo '{\"when\": 3}'", "not what was expected"),
        ("head -c 200000 /dev/zero", "prints more than 64 KB"),
    ],
)
def test_a_command_that_fails_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PlatformError, match=words):
        script(tmp_path, text).look()


def test_a_command_that_never_ends_is_ended_with_its_children(tmp_path: Path) -> None:
    source = script(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 1000 & sleep 1000")
    source.limit_s = 1.0
    with pytest.raises(PlatformError, match="did not end within 1 s"):
        source.look()
    group = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("children are left")


def test_no_such_command() -> None:
    with pytest.raises(PlatformError, match="cannot be started"):
        CommandSource("/no/such/command").look()


class Played:
    """A source that says what it is told to, one thing a look."""

    every_s = 0.01

    def __init__(self, name: str, *looks: tuple[Notice, ...] | PlatformError | Callable[[], None]) -> None:
        self.name, self._looks, self.asked = name, list(looks), 0

    def look(self) -> tuple[Notice, ...]:
        self.asked += 1
        now = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(now, PlatformError):
            raise now
        if callable(now):
            now()
            return ()
        return now


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_source_that_hangs_hides_no_other_and_failures_are_told_of_once() -> None:
    forever = threading.Event()
    hung = Played("hung", lambda: forever.wait(100) and None)
    wrong = PlatformError("it answered 500")
    gone = msgspec.structs.replace(notice(), source="flaky")
    flaky = Played("flaky", wrong, wrong, (gone,), (), ())
    changes: list[Change] = []
    said: list[str] = []
    watch = NoticeWatch([hung, flaky], changes.append, said.append)
    watch.start()
    try:
        wait_for(lambda: len(changes) == 2)
        assert [c.over for c in changes] == [False, True]
        assert said == [
            "notices from flaky: it answered 500; it is asked again",
            "notices from flaky: it answers again",
        ]
        assert not watch.asked_all() and watch.certain() == []
    finally:
        forever.set()
        watch.close()
