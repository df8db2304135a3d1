"""The real template with real forks; its imports take a second or two, so few tests share one."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.agent.template import Ended, Fork, Forked, Packet, Ready
from everstep.agent.template_client import WarmTemplate
from everstep.agent.worker_process import ERROR_MARK, WorkerError
from everstep.platforms.local import ended

pytestmark = pytest.mark.processes


class Bench:
    def __init__(self, tmp_path: Path) -> None:
        self.run_dir = tmp_path / "run"
        (self.run_dir / "logs").mkdir(parents=True)
        (self.run_dir / "sock").mkdir()
        self.script = tmp_path / "train.py"
        self.script.write_text("")
        self.template = WarmTemplate(self.run_dir, self.script, ["everstep_no_such_module"])
        ready = self.next()
        assert isinstance(ready, Ready)
        self.ready = ready

    def next(self) -> Packet | None:
        poller = select.poll()
        poller.register(self.template.conn, select.POLLIN)
        assert poller.poll(60_000), "the template said nothing"
        return self.template.receive()

    def fork(self, code: str, incarnation: int = 1, args: tuple[str, ...] = ()) -> int:
        self.script.write_text(code)
        logs = self.run_dir / "logs"
        self.template.fork(
            Fork(
                slot=0,
                incarnation=incarnation,
                env={"EVERSTEP_SLOT": "0", "HOME": None},
                argv=(str(self.script), *args),
                log=str(logs / "worker-0.log"),
                error=str(logs / "worker-0.error.json"),
                cwd=str(self.script.parent),
                threads=1,
            )
        )
        answer = self.next()
        assert isinstance(answer, Forked)
        return answer.pid

    def status(self) -> int:
        answer = self.next()
        assert isinstance(answer, Ended)
        return answer.status

    def log(self) -> str:
        return (self.run_dir / "logs" / "worker-0.log").read_text()

    def error(self) -> WorkerError:
        return msgspec.json.decode((self.run_dir / "logs" / "worker-0.error.json").read_bytes(), type=WorkerError)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("template"))
    yield made
    made.template.close()
    if not made.template.process.wait(60):
        made.template.process.signal(signal.SIGKILL)
    made.template.process.wait(60)
    made.template.process.reap()
    made.template.process.close()


def test_missing_preloads_do_not_matter(bench: Bench) -> None:
    assert "everstep_no_such_module" in bench.ready.failed


JOIN = (
    "import everstep.api.job as j\n"
    "class FakeJob:\n    closed = False\n    def never_took_a_batch(self): pass\n    def close(self): pass\n"
    "j._job = FakeJob()\n"
)


def test_script_runs_as_main_with_its_arguments_and_environment(bench: Bench) -> None:
    (bench.script.parent / "helper.py").write_text("WORD = 'local module'")
    bench.fork(
        JOIN + "import sys, os, pickle, helper, atexit, threading, time\n"
        "class A: pass\n"
        "def late():\n    time.sleep(0.05)\n    print('thread ended', A().__class__.__name__)\n"
        "atexit.register(lambda: print('atexit ran', A))\n"
        "print(__name__, sys.argv[1:], os.environ['EVERSTEP_SLOT'], 'HOME' in os.environ, helper.WORD)\n"
        "print(type(pickle.loads(pickle.dumps(A()))).__name__, sys.modules['torch'].get_num_threads())\n"
        "threading.Thread(target=late).start()\n",
        args=("--epochs", "2"),
    )
    assert bench.status() == 0
    log = bench.log()
    assert "__main__ ['--epochs', '2'] 0 False local module" in log
    assert "A 1" in log
    assert log.index("thread ended A") < log.index("atexit ran")


LATE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as es.join does
def asked_to_end():
    while True:
        frame, names = sys._current_frames()[threading.main_thread().ident], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if "_shutdown" in names:
            return os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)
threading.Thread(target=asked_to_end).start()
"""


def test_a_worker_that_is_asked_to_end_when_its_script_is_over_ends_as_it_would_have(bench: Bench) -> None:
    bench.fork(JOIN + LATE)
    assert bench.status() == 0
    bench.fork(LATE + "raise ValueError('no good')", incarnation=6)
    assert bench.status() == 1
    assert bench.error().line == "ValueError: no good (train.py:14)"


def test_script_error_is_told_with_its_place_and_without_our_frames(bench: Bench) -> None:
    bench.fork("def f():\n    raise ValueError('no good')\nf()\n", incarnation=2)
    assert bench.status() == 1
    error = bench.error()
    assert (error.incarnation, error.line, error.exit_code) == (2, "ValueError: no good (train.py:2)", 1)
    assert error.text.startswith("Traceback") and "worker.py" not in error.text
    assert ERROR_MARK in bench.log()


@pytest.mark.parametrize(
    ("code", "status", "line"),
    [
        ("import nowhere_to_be_found", 1, "ModuleNotFoundError: No module named 'nowhere_to_be_found' (train.py:1)"),
        ("x = (", 1, "SyntaxError: '(' was never closed (train.py:1)"),
        (
            "x = 1",
            1,
            "the script ended without joining the job: call everstep.join() and loop over job.steps(...) (train.py)",
        ),
        ("import sys; sys.exit(3)", 3, "the script ended itself with exit code 3 (train.py:1)"),
        ("import sys; sys.exit('no data')", 1, "no data (train.py:1)"),
        ("from everstep.errors import DataError\nraise DataError('no file x')", 2, "no file x (train.py:2)"),
    ],
)
def test_each_way_to_fail_is_one_line(bench: Bench, code: str, status: int, line: str) -> None:
    bench.fork(code, incarnation=3)
    assert bench.status() == status
    assert bench.error().line == line


def test_infrastructure_errors_and_kills_are_not_the_scripts(bench: Bench) -> None:
    error = bench.run_dir / "logs" / "worker-0.error.json"
    error.unlink(missing_ok=True)
    bench.fork("from everstep.errors import ServerLostError\nraise ServerLostError('ps:0 is gone')", incarnation=4)
    assert bench.status() == 4
    for _ in range(2):
        pid = bench.fork("import time; time.sleep(600)", incarnation=5)
        os.kill(pid, signal.SIGKILL)
        assert bench.status() == -signal.SIGKILL
    assert not error.exists()


def test_what_a_worker_started_ends_with_it(bench: Bench) -> None:
    note = bench.script.parent / "child"
    note.unlink(missing_ok=True)
    bench.fork(
        JOIN + "import subprocess, pathlib\n"
        f"child = subprocess.Popen(['sleep', '600'])\npathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
    )
    assert bench.status() == 0
    fd = -1
    try:
        fd = os.pidfd_open(int(note.read_text()))
    except ProcessLookupError:
        return
    assert ended(fd, 10.0)
    os.close(fd)


def test_template_killed_takes_its_workers_along(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    pid = bench.fork("import time; time.sleep(600)")
    fd = os.pidfd_open(pid)
    bench.template.process.signal(signal.SIGKILL)
    assert bench.next() is None
    assert ended(fd, 10.0)
    os.close(fd)
    assert bench.template.process.wait(10.0) and bench.template.process.reap() == -signal.SIGKILL
    bench.template.close()
    bench.template.process.close()


def test_template_ends_with_its_agent_and_removes_sockets(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    pid = bench.fork("import time; time.sleep(600)")
    fd = os.pidfd_open(pid)
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bench.run_dir / "sock" / "ps-0.sock"))
    bench.template.close()
    assert ended(fd, 10.0) and bench.template.process.wait(10.0)
    assert bench.template.process.reap() == 0
    assert list((bench.run_dir / "sock").iterdir()) == []
    os.close(fd)
    bench.template.process.close()
