"""A worker that is asked to leave while an object is finalized leaves all the same."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os, signal, time
from everstep.api.script_exit import ScriptExit, ask_again_when_lost

def leave(signo, frame):
    raise ScriptExit(128 + signo)

signal.signal(signal.SIGTERM, leave)
ask_again_when_lost()

def batches():
    try:
        yield 1
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # as if it came from outside just now
        for _ in range(10):
            pass

found = batches()
next(found)
del found  # its end raises where nobody can catch it
print("goes on", flush=True)
class Other:
    def __del__(self):
        raise ValueError("of the script's own")

Other()
for _ in range(200):
    time.sleep(0.1)
print("was never asked again", flush=True)
"""


def test_an_exit_that_a_finalizer_drops_is_asked_for_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout == "goes on\n"
    assert "ScriptExit" not in done.stderr and "of the script's own" in done.stderr
