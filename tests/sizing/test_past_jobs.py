"""Earlier jobs are found by script, arguments and machine, and estimates say which they used."""

from __future__ import annotations

import pytest
from sizes import probe, table

from everstep.sizing.past_jobs import (
    KeptJob,
    Likeness,
    MemoryLesson,
    PastJob,
    as_probes,
    memory_lessons,
    similar_jobs,
    with_history,
    with_lessons,
)
from everstep.sizing.size_choice import Binding, Estimator, Wishes


def past(number: int, rate: float = 9_000.0, **more: object) -> KeptJob:
    base: dict[str, object] = {
        "script": "train.py",
        "script_id": "s",
        "args_id": "a",
        "mode": "ps",
        "workers": 1,
        "ps": 1,
        "hardware": "box",
        "cores": 4,
        "phase": "done",
        "samples": 2_000_000,
        "epochs": 2,
        "wall_s": 230.0,
        "training_s": 222.0,
        "worker_peak_bytes": 400 << 20,
        "ps_peak_bytes": 90 << 20,
        "samples_per_s": rate,
    }
    return KeptJob(number, PastJob(float(number), "flights", **{**base, **more}))  # type: ignore[arg-type]


def test_the_nearest_and_newest_come_first() -> None:
    jobs = [
        past(1),
        past(2, args_id="b"),
        past(3, hardware="other"),
        past(4),
        past(5, script_id="t"),
        past(6, exit_code=1),
        past(7, mode="allreduce"),
        past(8, phase="suspended"),
    ]
    found = similar_jobs(jobs, "s", "a", "ps", "box")
    assert [(s.kept.number, s.likeness) for s in found] == [
        (4, Likeness.MACHINE),
        (1, Likeness.MACHINE),
        (3, Likeness.ARGUMENTS),
        (2, Likeness.SCRIPT),
    ]
    assert str(found[0]) == "job 4 (the same script, arguments and machine; 1 workers, 1 ps)"


def test_an_estimate_from_history_alone() -> None:
    jobs = [past(1, 8_000.0), past(2, 9_000.0), past(3, 17_000.0, workers=2), past(4, 5.0, hardware="other")]
    probes, used = as_probes(similar_jobs(jobs, "s", "a", "ps", "box"))
    assert [s.kept.number for s in used] == [2, 3], "the newest of each size"
    sizing = Estimator(tuple(probes), Wishes(memory_bytes=16e9, workers=2, ps=1)).sizing()
    assert sizing.size.samples_per_s == 17_000.0
    assert sizing.figures["duration"].value == pytest.approx(8.0 + 2_000_000 / 17_000.0)
    assert sizing.figures["ps_memory"].value == 90 << 20
    assert sizing.binding is Binding.UNKNOWN
    assert "master_memory" not in sizing.figures, "records do not have it"
    assert sizing.figures["worker_memory"].reason == "peak of an earlier job"
    assert not any("no tables" in note for note in sizing.notes), "records do not know tables"


def test_error_bars_reach_to_what_earlier_jobs_did() -> None:
    probes = (probe(tables=(table(),)), probe(2, 2, rate=20_000.0, tables=(table(),)))
    sizing = Estimator(probes, Wishes(memory_bytes=16e9, workers=1, ps=1)).sizing()
    similar = similar_jobs([past(1, 7_000.0), past(2, 100.0, args_id="b")], "s", "a", "ps", "box")
    found = with_history(sizing, similar)
    assert found.figures["samples_per_s"].low == 7_000.0 < sizing.figures["samples_per_s"].low
    assert any("job 1 " in note and "the error bar reaches" in note for note in found.notes)
    assert any("job 2 " in note for note in found.notes)
    assert found.size == sizing.size


def test_what_a_job_died_of_is_a_lesson_also_if_it_failed() -> None:
    mb = 1 << 20
    jobs = [
        past(1, too_small={"ps": 100 * mb, "worker": 600 * mb}, phase="failed", exit_code=4),
        past(2, too_small={"ps": 144 * mb}, memory={"ps": 288 * mb}, ps=2),
        past(3, too_small={"ps": 999 * mb}, args_id="b"),
        past(4),
    ]
    ps, worker = memory_lessons(jobs, "s", "a", "ps")
    assert ps == MemoryLesson(2, "ps", 144 * mb, 2, 288 * mb) and worker == MemoryLesson(1, "worker", 600 * mb, 1)
    assert ps.needed_bytes(2) == 288 * mb and ps.needed_bytes(4) == 144 * mb and worker.needed_bytes(4) == 1200 * mb
    assert ps.words == "job 2: a ps died of 144.0 MiB of memory (2 ps), and came to its end with 288.0 MiB"
    assert memory_lessons([past(5, too_small={"ps": 0, "moon": 7})], "s", "a", "ps") == []


def test_an_estimate_starts_from_what_a_job_died_of() -> None:
    sizing = Estimator((probe(tables=(table(),)),), Wishes(workers=1, ps=1)).sizing()
    had = sizing.figures["ps_memory"].value
    lesson = MemoryLesson(7, "ps", round(2 * had), 1)
    found = with_lessons(sizing, [lesson])
    figure = found.figures["ps_memory"]
    assert figure.value == 2 * round(2 * had) and figure.low <= figure.value <= figure.high
    assert figure.reason == lesson.words and any("job 7" in note for note in found.notes)
    small = with_lessons(sizing, [MemoryLesson(8, "ps", round(had / 4), 1)])
    assert small.figures["ps_memory"] == sizing.figures["ps_memory"], "the probe needs more than that"
