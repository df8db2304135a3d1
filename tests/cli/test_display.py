import io
from pathlib import Path

import msgspec
import pytest

from everstep.cli.display import (
    Display,
    JobSummary,
    LiveScreen,
    PlainScreen,
    ScriptOutput,
    summary_lines,
)
from everstep.cli.tail import LogTail
from everstep.cli.view_text import clock, current_epoch, eta_s, picture, progress_line, protection_text
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.job_view import EpochView, JobView, MemberView, ProtectionView, ShownState
from everstep.model.member import Role


def epoch(number: int, done: int, shards: int = 10) -> EpochView:
    return EpochView("train", number, 3, shards, shards - done, 0, done, shards * 100, done * 100)


def report(*epochs: EpochView, **changes: object) -> JobView:
    member = MemberView(
        Role.WORKER, Slot(0), Incarnation(2), NodeId("node0"), 4711, ShownState.ALIVE, 1, "train e0 #4", 90.0
    )
    base = JobView(
        job="flights",
        phase="training",
        at=107.0,
        started_at=100.0,
        master_incarnation=Incarnation(1),
        members=(member,),
        epochs=epochs,
        samples_done=sum(e.samples_done for e in epochs),
        samples_per_s=100.0,
        reported={"loss": 0.4321},
        failures={"worker": 1, "ps": 0},
        batches_retried=3,
    )
    return msgspec.structs.replace(base, **changes)


def text_of(status: JobView) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=120).print(picture(status))
    return out.getvalue()


def test_current_epoch_is_the_first_unfinished_one() -> None:
    assert current_epoch(report()) is None
    assert current_epoch(report(epoch(0, 10), epoch(1, 4))) == 1
    assert current_epoch(report(epoch(0, 10))) == 0


def test_eta_counts_what_is_left_of_all_known_epochs() -> None:
    assert eta_s(report(epoch(0, 10), epoch(1, 4))) == 6.0
    assert eta_s(report(epoch(0, 4), samples_per_s=0.0)) is None
    assert [clock(s) for s in (0, 7.4, 61, 3723)] == ["0:00", "0:07", "1:01", "1:02:03"]


def test_progress_line_and_picture_say_the_same_facts() -> None:
    status = report(epoch(0, 10), epoch(1, 4))
    line = progress_line(status)
    assert line == "train epoch 2/3 40.0%  100 samples/s  ETA 0:06  loss 0.4321  worker 1/1"
    shown = text_of(status)
    for fact in (
        "worker:0",
        "alive",
        "4711",
        "train e0 #4",
        "epoch 2/3",
        "ETA 0:06",
        "0.4321",
        "1 worker",
        "3 batches",
    ):
        assert fact in shown


def test_a_picture_before_anything_is_known() -> None:
    assert "starting" in text_of(report(phase="starting", members=(), reported={}, failures={}))


def test_plain_screen_prints_progress_only_now_and_then() -> None:
    now = [0.0]
    out = io.StringIO()
    screen = PlainScreen(out, every_s=5.0, now=lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        screen.picture(report(epoch(0, 4)))
    assert out.getvalue().count("epoch 1/3") == 2


def test_live_screen_shows_lines_above_the_picture() -> None:
    out = io.StringIO()
    screen = LiveScreen(out)
    screen.picture(report(epoch(0, 4)))
    screen.line("worker:1 lost: it was killed by SIGKILL [not markup]", "event", 1.0)
    screen.line("loss 0.5", "script")
    screen.close()
    assert "worker:1 lost: it was killed by SIGKILL [not markup]" in out.getvalue() and "loss 0.5" in out.getvalue()


def test_tail_waits_for_whole_lines_and_survives_truncation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.lines() == []
    with path.open("a") as log:
        log.write("one\ntw")
        log.flush()
        assert tail.lines() == ["one"]
        log.write("o\n")
        log.flush()
        assert tail.lines() == ["two"]
    path.write_text("x\nend")
    assert tail.lines() == ["x"]
    assert tail.lines(last=True) == ["end"]
    assert tail.lines(last=True) == []


def test_marks_and_traceback_of_a_worker_are_not_shown_but_the_next_life_is(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(
        "--- everstep: worker 0 #1 started\nhello\n--- everstep: the script failed\nTraceback\nValueError\n"
        "--- everstep: worker 0 #2 started\nagain\n"
    )
    assert ScriptOutput(log).lines() == ["hello", "again"]


def test_display_shows_events_own_lines_and_the_scripts_output_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    out = io.StringIO()
    display = Display(tmp_path, lambda: None, lambda: PlainScreen(out))
    display.start()
    (tmp_path / "events.jsonl").write_text(
        '{"at":1,"member":"worker:1","action":"restart","reason":"signal 9"}\nnot json\n'
    )
    (tmp_path / "logs" / "worker-0.log").write_text("auc 0.79\n")
    display.say("master lost")
    display.stop()
    shown = out.getvalue()
    assert "worker:1 restart: signal 9" in shown and "master lost" in shown and "\nauc 0.79\n" in "\n" + shown


def test_a_gone_terminal_does_not_end_the_display_thread(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    display = Display(tmp_path, lambda: None, lambda: PlainScreen(Gone()))
    display.start()
    display.say("x")
    display.stop()


@pytest.mark.parametrize(("failures", "words"), [({"worker": 2, "master": 1}, "1 master, 2 worker"), ({}, "none")])
def test_summary_names_what_was_survived(failures: dict[str, int], words: str, tmp_path: Path) -> None:
    summary = JobSummary("done", 0, "", 1_000_000, 12.5, 80_000.0, failures, 4, {"auc": 0.7912})
    text = "\n".join(summary_lines(summary, tmp_path))
    assert f"failures survived: {words}; batches retried: 4" in text
    assert "1,000,000 samples in 12.5 s, 80,000 samples/s" in text and "auc 0.7912" in text


def test_protection_in_words() -> None:
    assert protection_text(ProtectionView("4+1", "acked", full=64)) == "parity 4+1: 64 of 64 partitions protected"
    text = protection_text(
        ProtectionView("4+2", "eager", 40, 20, 4, moving=3, rebuilding=11, building=2, rebuild_share=0.2)
    )
    assert text == (
        "parity 4+2 eager: 40 of 64 partitions protected, 20 less, 4 not; 11 rebuilding; 3 moving; 2 mirrors being made"
        "; for this at most 20% of a ps' time"
    )
    assert protection_text(ProtectionView("0", "acked", none=64, moving=1)) == "parity off; 1 moving"
    covered = protection_text(ProtectionView("2+1", "acked", full=64, machines=3))
    assert covered.endswith("protected; any one of 3 machines but the master's may be lost")
    text = protection_text(ProtectionView("2+1", "acked", full=64, machines=3, lost_with_machine=9, worst_machine="m2"))
    assert text.endswith("protected; the loss of m2, one of 3 machines, would cost 9 of 64")


def test_workers_that_wait_for_each_other_are_said() -> None:
    assert "bounded:3" in text_of(report(epoch(0, 1), consistency="bounded:3"))
    assert "async" not in text_of(report(epoch(0, 1)))
