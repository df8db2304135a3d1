"""What a kill in mode allreduce cost, read from written records of steps."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def write(folder: Path, name: str, pid: int, at: list[float], again: tuple[float, ...] = ()) -> None:
    lines = [(t, "-") for t in at] + [(t, "again") for t in again]
    (folder / f"{name}.{pid}.log").write_text("".join(f"{t:.6f} 1 {note}\n" for t, note in sorted(lines)) + "12.3 torn")


def ticks(begin: float, end: float, every: float = 0.1) -> list[float]:
    return [begin + i * every for i in range(round((end - begin) / every))]


def test_a_kill_is_the_second_step_of_the_slowest_survivor(tmp_path: Path) -> None:
    from benchmarks._replica import Kill, read_steps, step_s

    write(tmp_path, "w0", 10, ticks(0, 5) + ticks(5.31, 9))
    write(tmp_path, "w1", 11, ticks(0, 5) + ticks(5.33, 9), again=(5.2, 5.25))  # the same step twice
    write(tmp_path, "w2", 12, ticks(0, 5))
    write(tmp_path, "w2", 13, ticks(6.5, 9))
    write(tmp_path, "w0", 9, ticks(-3, -1))  # was killed before
    records = read_steps(tmp_path)
    kill = Kill(records, 5.0, {12, 9}, 9.0)
    assert kill.recovered_s == pytest.approx(0.43) and kill.rejoined_s == pytest.approx(1.5)
    assert (kill.redone, kill.tries) == (1, 2) and kill.pause_s == kill.usual_s == pytest.approx(0.1)
    assert step_s(records) == pytest.approx(0.1)


def test_the_pause_of_a_rejoin_is_the_longest_gap_around_it(tmp_path: Path) -> None:
    from benchmarks._replica import Kill, read_steps

    write(tmp_path, "w0", 10, ticks(0, 4) + ticks(4.05, 6.4) + ticks(6.7, 9))
    write(tmp_path, "w1", 11, ticks(0, 5))
    write(tmp_path, "w1", 12, ticks(6.7, 9))
    kill = Kill(read_steps(tmp_path), 5.0, {11}, 9.0)
    assert kill.pause_s == pytest.approx(0.35) and kill.usual_s == pytest.approx(0.15)


def test_a_survivor_that_never_steps_again_is_not_forgotten(tmp_path: Path) -> None:
    from benchmarks._replica import Kill, read_steps

    write(tmp_path, "w0", 10, ticks(0, 9))
    write(tmp_path, "w1", 11, ticks(0, 5))
    write(tmp_path, "w2", 12, ticks(0, 5))
    kill = Kill(read_steps(tmp_path), 5.05, {12}, 9.0)
    assert kill.recovered_s != kill.recovered_s and kill.rejoined_s != kill.rejoined_s


def test_where_everybody_is_restarted_the_new_processes_count(tmp_path: Path) -> None:
    from benchmarks._replica import Kill, read_steps

    for slot in range(3):
        write(tmp_path, f"w{slot}", 10 + slot, ticks(0, 5))
        write(tmp_path, f"w{slot}", 20 + slot, ticks(25 + slot, 30))
    kill = Kill(read_steps(tmp_path), 5.0, {11}, 40.0, restarted=True)
    assert kill.recovered_s == pytest.approx(22.1)
