"""A thread of a ps that gets no memory ends the process with the status that says so: a job must not wait for it."""

from __future__ import annotations

import subprocess
import sys

from everstep.model.memory_limit import MEMORY_STATUS

SCRIPT = """
import threading, time
from everstep.ps.ps_process import end_threads_for_memory
end_threads_for_memory()
def fail():
    raise {error}("std::bad_alloc")
thread = threading.Thread(target=fail, daemon=True)
thread.start()
thread.join(60)
print("goes on")
"""


def end_of(error: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)], capture_output=True, text=True, timeout=60
    )


def test_a_thread_without_memory_ends_the_ps_with_one_line() -> None:
    done = end_of("MemoryError")
    assert done.returncode == MEMORY_STATUS and done.stdout == ""
    assert done.stderr == "everstep: this ps gets no memory any more; it ends, and what others keep of it goes on\n"


def test_a_thread_that_could_not_start_another_one_ends_it_too() -> None:
    script = SCRIPT.format(error="RuntimeError").replace("std::bad_alloc", "can't start new thread")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == MEMORY_STATUS and "gets no memory" in done.stderr


def test_a_thread_that_fails_otherwise_does_not() -> None:
    done = end_of("OSError")
    assert done.returncode == 0 and done.stdout == "goes on\n" and "OSError" in done.stderr
