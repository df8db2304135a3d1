"""Batches that are read before they are asked for: never another one than was asked for, each place read once."""

from __future__ import annotations

from everstep.allreduce.batch_prefetch import PrefetchReader


def test_what_was_guessed_is_read_while_there_is_time_and_only_once() -> None:
    read: list[tuple[int, int, int]] = []

    def reader(epoch: int, lo: int, hi: int) -> tuple[int, int, int]:
        read.append((epoch, lo, hi))
        if lo == 90:
            raise OSError("no such sample")
        return epoch, lo, hi

    prefetched = PrefetchReader(reader, prefetch=True)
    prefetched._took_s.append(0.0)  # quick: nothing goes to the other thread
    assert prefetched.get((0, 0, 8)) == (0, 0, 8)
    prefetched.begin((0, 8, 16))
    prefetched.fill()
    prefetched.fill()
    assert read == [(0, 0, 8), (0, 8, 16)]
    assert prefetched.get((0, 8, 16)) == (0, 8, 16) and len(read) == 2
    prefetched.begin((0, 16, 24))
    prefetched.fill()
    assert prefetched.get((1, 0, 8)) == (1, 0, 8)  # a wrong guess
    assert prefetched.get((0, 16, 24)) == (0, 16, 24) and read[-1] == (0, 16, 24)
    prefetched.begin((0, 90, 98))
    prefetched.fill()  # whoever asks for it hears of it
    try:
        prefetched.get((0, 90, 98))
    except OSError:
        pass
    else:
        raise AssertionError("the error was swallowed")
    prefetched.close()
    alone = PrefetchReader(reader, prefetch=False)
    alone.get((0, 0, 8))
    alone.begin((0, 8, 16))
    alone.fill()
    assert read[-1] == (0, 0, 8)
    alone.close()
