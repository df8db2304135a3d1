"""What the benchmark of the supervisor reads off journals and recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.brain.supervision import JobStage
from everstep.platforms.traces import parse_trace


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_moments_that_follow_each_other_are_one_span() -> None:
    from benchmarks._supervised import Moment, spans_of

    one = Moment(0.0, JobStage.RUNNING, "", False, 0, 2, 1, 1, 0, False)
    lacks = [(0.0, ""), (1.0, "a"), (2.0, "b"), (3.0, ""), (5.0, "a"), (6.0, "")]
    moments = [one._replace(at=at, lack=lack) for at, lack in lacks]
    assert spans_of(moments, lambda m: m.lack != "") == [(1.0, 3.0), (5.0, 6.0)]
    assert spans_of(moments, lambda m: m.lack == "") == [(0.0, 1.0), (3.0, 5.0), (6.0, 6.0)]
    assert spans_of([], bool) == []


def test_a_part_of_a_recording_is_a_recording() -> None:
    """East, from 11.9 h: two machines, three at 12 h, four five minutes later, ... none at 12.58 h."""
    from benchmarks._supervised import RECORDED, part_of

    trace = parse_trace(part_of(RECORDED / "us-east-1f_v100_1.json.gz", 11.9, 13.0))
    changes = sorted([(life.begin_s, 1) for life in trace.lives] + [(x.end_s, -1) for x in trace.lives if x.end_s])
    counts, count = [], 0
    for number, (at, change) in enumerate(changes):
        count += change
        if number + 1 == len(changes) or changes[number + 1][0] != at:
            counts.append(count)
    assert counts == [2, 3, 4, 2, 1, 0]


def test_a_claim_that_is_not_true_and_a_story_that_failed_are_seen() -> None:
    from benchmarks.supervise import STORIES, Told, summed

    one, other = STORIES[:2]
    good = Told(one, {"max_wait: not before": True, "max_wait: later": False, "budget: kept": True}, "", None, 1.0)
    figures = summed([good, Told(other, {}, "it does not end", None, 1.0)], 1.0)
    assert figures["figures"]["exact"] == 0.5
    assert figures["figures"]["shown.max_wait"] == 0.0 and figures["figures"]["shown.budget"] == 1.0
    assert figures["figures"][f"shown.story_{other.name}"] == 0.0
    assert figures["holds"] == {"exact": False, "shown": False}


def test_every_setting_of_the_supervisor_has_a_story_and_every_mode_some() -> None:
    from benchmarks.supervise import STORIES

    flags = {flag for story in STORIES for flag in story.flags.split()}
    wanted = {"--min-workers", "--max-workers", "--min-ps", "--max-ps", "--max-wait", "--on-wait-timeout", "--recovery"}
    wanted |= {"--global-batch", "--fail-tolerance", "--fallback", "--reliable", "--stabilization", "--budget"}
    assert wanted <= flags
    modes = {("allreduce" in story.flags, "--ps" in story.flags) for story in STORIES}
    assert modes == {(False, True), (True, False), (True, True)}
