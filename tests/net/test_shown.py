"""Control characters from others never reach a log or a terminal as they are."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from everstep.brain.events import FinishJob, Note
from everstep.cli.display import PlainScreen
from everstep.cli.main import _fail
from everstep.errors import escaped, escaped_lines
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.decision import Decision
from everstep.model.job_view import JobView, MemberView, ShownState
from everstep.model.member import Role
from everstep.net.log import PlainFormatter
from everstep.net.shown import shown

EVIL = "n\x1b[2J\x1b]0;gone\x07\r\nforged line\u2028\x9b31m\x00"


def plain(text: str) -> bool:
    return all(c.isprintable() for c in text)


def test_escaped() -> None:
    assert escaped("a b ü 字 😀") == "a b ü 字 😀"
    assert escaped("\x1b[31m\n\t\x9b\u2028") == r"\x1b[31m\n\t\x9b\u2028"
    assert plain(escaped(EVIL)) and len(escaped("x" * 10**6)) < 2100
    assert escaped_lines("a\n\tb\x1b[0m") == "a\n        b\\x1b[0m"


def test_every_text_of_a_message_is_escaped() -> None:
    member = MemberView(Role.WORKER, Slot(0), Incarnation(1), NodeId(EVIL), 1, ShownState.ALIVE, works_on=EVIL)
    report = JobView(
        job=EVIL,
        phase="training",
        at=0.0,
        started_at=0.0,
        master_incarnation=Incarnation(1),
        members=(member,),
        epochs=(),
        samples_done=0,
        samples_per_s=0.0,
        reported={EVIL: 1.0},
        failures={},
        batches_retried=0,
        error=EVIL,
    )
    made = shown(report)
    for text in (made.job, made.error, made.members[0].node, made.members[0].works_on, *made.reported):
        assert plain(text) and "forged line" in text
    assert made.members[0].role is Role.WORKER  # an enum stays one
    harmless = Note("worker:1", Decision("joined", "process 7"))
    assert shown(harmless) is harmless
    assert plain(str(shown(Note(EVIL, Decision(EVIL, EVIL))).decision)) and plain(shown(FinishJob(1, EVIL)).error)


def test_a_record_of_a_log_is_one_line() -> None:
    formatter = PlainFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "from %s", (EVIL,), None)
    assert plain(formatter.format(record))
    try:
        raise ValueError(EVIL)
    except ValueError:
        failed = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    text = formatter.format(failed)
    assert text.count("Traceback") == 1 and all(plain(line) for line in text.split("\n")) and "\x1b" not in text


def test_a_screen_and_an_error_show_it_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    screen = PlainScreen(out)
    screen.line(EVIL, "event")
    assert all(plain(line) for line in out.getvalue().rstrip("\n").split("\n")) and "\x1b" not in out.getvalue()
    with pytest.raises(SystemExit):
        _fail(EVIL, 2)
    shown_error = capsys.readouterr().err
    assert plain(shown_error.rstrip("\n"))
