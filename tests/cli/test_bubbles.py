"""``everstep bubbles``: words, a picture and a trace of measured iterations."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from everstep.cli.bubbles import show_bubbles
from everstep.errors import ConfigError
from everstep.model.stage_spans import CopyTotals, SpanKind, StageIteration, StageSpan
from everstep.monitor.span_log import FOLDER, SpanLog, read_spans


def iteration(stage: int, step: int) -> StageIteration:
    at = 0.001 * stage
    return StageIteration(
        worker=0,
        stage=stage,
        stages=2,
        parts=2,
        microbatches=1,
        schedule="Schedule1F1B",
        step=step,
        generation=3,
        samples=8,
        seen=step,
        began_s=10.0 + step,
        spans=(
            StageSpan(SpanKind.WAIT, 0.0, at),
            StageSpan(SpanKind.COPY, 0.0, at / 2),
            StageSpan(SpanKind.PERSIST, at / 2, at),
            StageSpan(SpanKind.FORWARD, at, at + 0.001, stage, 0),
            StageSpan(SpanKind.BACKWARD, 0.004 - 2 * at, 0.006 - 2 * at, stage, 0),
            StageSpan(SpanKind.REDUCE, 0.006, 0.007),
        ),
        state_bytes=1_000_000 if stage else 100_000_000,
        copy_bytes_per_s=1e9,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for stage in range(2):
        log = SpanLog(tmp_path, 0, stage)
        for step in range(6):
            log.write(iteration(stage, step))
        log.close()
    return tmp_path


def test_words(run_dir: Path) -> None:
    said = show_bubbles(run_dir, None)
    assert "worker:0, generation 3: 2 stages, Schedule1F1B, 1 microbatches of 8 samples, 4 iterations" in said
    rows = [line.split() for line in (said.splitlines()[2], said.splitlines()[4])]
    assert "(100.0 MB, at 1.0 GB/s) would have 2 % in idle spans and stall" in said
    assert "(1.0 MB, at 1.0 GB/s) would fit the idle spans of each iteration" in said
    assert [row[:5] for row in rows] == [["0", "3.0", "ms", "3.0", "ms"], ["1", "3.0", "ms", "3.0", "ms"]]
    assert all("50.0" in row and row.count("%") >= 2 for row in rows)
    assert "6.0 ms from the first forward to the last backward, then 1.0 ms to reduce" in said


def test_a_picture_and_a_trace(run_dir: Path) -> None:
    show_bubbles(run_dir, run_dir / "out.svg")
    picture = (run_dir / "out.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "stage 1" in picture and "by the formula 50.0 %" in picture
    assert picture.count("#d98880") == picture.count("#7d3c98") == 2  # the legend, and the wait of stage 1
    show_bubbles(run_dir, run_dir / "out.json")
    events = json.loads((run_dir / "out.json").read_text())["traceEvents"]
    assert len(events) == 2 * 6 * 6
    assert {(e["pid"], e["tid"]) for e in events} == {(0, 0), (0, 1)}
    assert sorted({e["name"] for e in events}) == [
        "backward 0.0",
        "backward 1.0",
        "copy",
        "forward 0.0",
        "forward 1.0",
        "persist",
        "reduce",
        "wait",
    ]


def test_lines_that_were_cut_off_are_left_out(run_dir: Path) -> None:
    path = run_dir / FOLDER / "worker-0.stage-1.jsonl"
    path.write_bytes(path.read_bytes()[:-30] + b"\nnonsense\n{}\n")
    assert len(read_spans(run_dir)) == 11


def test_what_is_refused(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="has no measured iterations of stages"):
        show_bubbles(tmp_path_factory.mktemp("empty"), None)
    with pytest.raises(ConfigError, match=r"ends with \.svg"):
        show_bubbles(run_dir, run_dir / "out.png")


def test_too_few_to_say(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, 0, 0)
    log.write(iteration(0, 0))
    log.close()
    assert "too few to say" in show_bubbles(tmp_path, None)


def test_what_the_neighbour_keeps_and_what_both_sides_pay(tmp_path: Path) -> None:
    totals = CopyTotals(copies=9, inside_bytes=9_000_000, neighbour="c", kept=7, sent_bytes=7_000_000)
    totals = msgspec.structs.replace(totals, sent_late_bytes=700_000, sent_s=0.0125, received_s=0.034, behind=2)
    totals = msgspec.structs.replace(totals, received_late_bytes=1_400_000)
    log = SpanLog(tmp_path, 0, 0)
    for step in range(6):
        log.write(msgspec.structs.replace(iteration(0, step), stages=1, copies=totals))
    log.close()
    said = show_bubbles(tmp_path, None)
    assert "node c has acknowledged 7 of them: 7.0 MB sent, 90.0 % of it begun in waits" in said, said
    assert (
        "12.5 ms of the processor here, 34.0 ms there, 80.0 % of it taken in while stages of that node waited" in said
    )
    assert "waited; 2 copies are in the own memory only" in said, said
