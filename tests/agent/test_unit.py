"""A worker of several processes lives and dies as one. Small processes without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from everstep.agent import unit
unit._STOPPED_S = 0.2
unit.become_unit(3)
place = os.environ[unit.VARIABLE].partition(":")[0]
if place == "1/3":
    {follower}
    os._exit(0)
if place == "2/3":
    {other}
    os._exit(0)
unit.await_followers()
print("leader ends", flush=True)
"""


@pytest.mark.parametrize(
    "follower, other, status, words",
    [
        ("pass", "os._exit(143)", 0, "leader ends"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(60)", -9, "process 1 of this worker ended with status -9"),
        ("time.sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)", -9, "process 2 of this worker is stopped"),
        ("os._exit(3)", "time.sleep(60)", 3, "process 1 of this worker ended with status 3"),
    ],
    ids=["in order", "killed", "stopped", "failed"],
)
def test_the_end_of_one_process_is_that_of_all(follower: str, other: str, status: int, words: str) -> None:
    program = PROGRAM.format(follower=follower, other=other)
    # (the pipe ends when nobody has it any more: all of them are gone)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert words in done.stdout + done.stderr
