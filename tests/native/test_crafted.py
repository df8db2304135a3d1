"""A snapshot or a difference that somebody made by hand, with right checksums, is refused in one line; no process dies
of it, and the twin says the same. Each attempt is made in a process of its own: a crash is a failure here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CRAFTED = Path(__file__).with_name("crafted.py")


def run(seed: int, count: int) -> str:
    done = subprocess.run([sys.executable, str(CRAFTED), str(seed), str(count)], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-6:]
    assert done.returncode == 0, f"python {CRAFTED} {seed} {count} ended with {done.returncode} after: {last}"
    return done.stdout


def test_marks_of_another_kind_are_refused() -> None:
    """The hole as it was found: a part is used before anybody has looked whether there can be one."""
    script = (
        "import struct; from everstep.native import Store; from everstep.native.blob import *; s = Store(4, 7)\n"
        "for kind in (1, 2, 3, 4):\n"
        "    data = bytearray(build(Blob(BlobKind.MARKS, 2, 0, BlobMarks())))\n"
        "    data += struct.pack('<6I', 1, 1, 0, 64, 0, 0) + bytes(64)\n"
        "    struct.pack_into('<HII', data, 6, kind, 2, 1)\n"
        "    s.load_begin(2)\n"
        "    try: s.load_end(2, seal(bytes(data)))\n"
        "    except ValueError as error: print(kind, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    assert [line[0] for line in done.stdout.splitlines()] == ["1", "2", "3", "4"]


def test_what_nobody_made_is_refused_and_kills_nobody() -> None:
    out = run(1, 120)
    assert "refused" in out
    assert "loaded" in out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_more_of_them(seed: int) -> None:
    run(seed, 2000)
