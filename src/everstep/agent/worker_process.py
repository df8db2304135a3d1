"""Runs in a freshly forked worker: it becomes a clean process, runs the user's script as ``__main__``, tells its
error."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import random
import signal
import sys
import threading
import time
import traceback
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from everstep.agent.script_failures import cause_of
from everstep.agent.stacks import dump_on_signal
from everstep.agent.unit import await_fate, await_followers, become_unit
from everstep.config.load import read_spec
from everstep.errors import EverstepError, ScriptError, script_place
from everstep.model.failure import Failure
from everstep.monitor.memory_room import bound_memory
from everstep.storage.atomic import private
from everstep.storage.space import is_full

if TYPE_CHECKING:
    from everstep.agent.template import Fork

LOG_MARK = "--- everstep: "
"""Begins the lines that everstep itself writes into a worker's log."""
ERROR_MARK = LOG_MARK + "the script failed"
TERMINATED = 128 + signal.SIGTERM  # exit code of a worker that was told to end and left in order


class WorkerError(msgspec.Struct, frozen=True):
    """Says why a worker's script ended, in ``logs/worker-N.error.json``.

    ``line``: one line with its place. ``text``: the traceback from the script's first frame on, "" where the line
    says it all. ``exit_code``: what the job shall end with. ``too_large``, ``failure``: see
    ``brain.events.ProcessExited``."""

    incarnation: int
    line: str
    text: str
    exit_code: int
    too_large: int = 0
    failure: Failure | None = None


def run_worker(request: Fork) -> NoReturn:
    """Run the worker, in the forked child: never returns. Exit status 0: the script ended by itself."""
    _become(request)
    sys.argv = list(request.argv)
    script = Path(request.argv[0])
    try:
        code = _outcome(request, script)
        _end_anyway(code)
    except SystemExit as exit_:  # by SIGTERM, while its end was dealt with
        code = _exit_status(exit_)
        _end_anyway(code)
    code = _leave(request, code, script)
    os._exit(code)


def _outcome(request: Fork, script: Path) -> int:
    """Run the script and leave the job; the exit status."""
    try:
        if request.processes > 1:
            become_unit(request.processes)
        _seed()
        _run_script(script)
        _leave_job()
        await_followers()
    except SystemExit as exit_:
        code = _exit_status(exit_)
        if code and code != TERMINATED:
            _end_anyway(code)
            sys.last_value = exit_  # as in ``_failed``
            what = exit_.code if isinstance(exit_.code, str) else f"the script ended itself with exit code {code}"
            _tell(request, WorkerError(request.incarnation, f"{what} ({script_place(exit_, script)})", "", 1))
        return code
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        _end_anyway(1)
        return _failed(request, error, script)
    return 0


def _end_anyway(status: int) -> None:
    """The script is over: being asked to end changes nothing any more, and does not disturb what is done last; asked
    once more, the process ends at once. Without it a worker that was done counts as lost (its end fails by the
    SystemExit that ends scripts), and one that failed does not tell why."""
    times = iter((False, True))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(status) if next(times, True) else None)


def _become(request: Fork) -> None:
    for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signo, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    dump_on_signal(Path(request.log))
    sys.stdout, sys.stderr = _log_stream(1, "stdout"), _log_stream(2, "stderr")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"{LOG_MARK}worker {request.slot} #{request.incarnation} started {now} pid {os.getpid()}", flush=True)
    for name, value in request.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(request.cwd)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(request.threads)
    if request.memory_bytes:
        bound_memory(request.memory_bytes)


def _seed() -> None:
    """Seed random and numpy by the job's seed, as ``everstep.join`` seeds torch: a model that is built with them is the
    same in all workers. (A script that seeds them itself has its own.)"""
    with contextlib.suppress(EverstepError, KeyError):  # (join says what is wrong)
        seed = read_spec(Path(os.environ["EVERSTEP_RUN_DIR"])).seed
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)


class _LogFile(io.FileIO):
    """Is a worker's log: a full disk costs the script's lines, not the script."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not is_full(error):
                raise
            return memoryview(data).nbytes


def _log_stream(fd: int, name: str) -> io.TextIOWrapper:
    old = sys.stdout if fd == 1 else sys.stderr
    raw = _LogFile(fd, "wb", closefd=False)
    stream = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, old.errors, line_buffering=True)
    raw.name = f"<{name}>"
    return stream


def _run_script(script: Path) -> None:
    """Run the script as ``python script`` does: a fresh ``__main__``, the script's directory first on the path."""
    path = str(script)
    sys.path.insert(0, str(script.resolve().parent))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    sys.modules["__main__"] = main
    code = compile(script.read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _leave_job() -> None:
    """Leave the job: the script ended well. Raises ScriptError if it never joined, or never took a batch."""
    from everstep.api import job

    if job._job is None:
        raise ScriptError("the script ended without joining the job: call everstep.join() and loop over job.steps(...)")
    job.script_ended()


def _failed(request: Fork, error: BaseException, script: Path) -> int:
    """Tell it; the exit status. Errors of the infrastructure (a server lost, fenced) are not the script's."""
    await_fate()
    sys.last_value = error  # as the interpreter does: what runs at exit sees that the script failed
    text = "".join(_trim(error, script).format())
    print(f"{ERROR_MARK}\n{text}", end="", file=sys.stderr, flush=True)
    if isinstance(error, EverstepError) and error.exit_code == 4:
        return 4
    place = script_place(error, script)
    if isinstance(error, EverstepError):
        ended = Failure("script", f"{type(error).__name__} ({place})", exit_code=error.exit_code)
        _tell(request, WorkerError(request.incarnation, f"{error} ({place})", "", error.exit_code, 0, ended))
        return error.exit_code
    last = with_advice(traceback.format_exception_only(error)[-1].strip(), request.processes > 1)
    samples, by_a_plan = _too_large(error)
    by_a_plan = by_a_plan and request.processes <= 1  # (of several processes any may be the one: nobody waits to hear)
    if samples and not by_a_plan:
        last += (
            f" (in a pass of {samples} samples: use a smaller batch_size, or say what fits into this worker, "
            "job.loader(..., largest_batch=...), and a batch is computed in several passes)"
        )
    cause = cause_of(error)
    steps, reached = _steps()
    failure = Failure(cause, f"{type(error).__name__} ({place})", steps, reached=reached)
    too_large = samples if by_a_plan else 0
    _tell(request, WorkerError(request.incarnation, f"{last} ({place})", text, 1, too_large, failure))
    if by_a_plan or cause != "script":  # no end of the script: the others wait for this one, and another one is to come
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
    return 1


def _too_large(error: BaseException) -> tuple[int, bool]:
    """See ``api.job.pass_too_large``; nothing where the script did not get so far."""
    job = sys.modules.get("everstep.api.job")
    found: tuple[int, bool] = job.pass_too_large(error) if job is not None else (0, False)
    return found


def _steps() -> tuple[int, int]:
    """Return how many steps this process has done, and the job's step that it is at."""
    job = sys.modules.get("everstep.api.job")
    return (job.steps_done(), job.step_reached()) if job is not None else (0, 0)


_OF_SHARDED = (
    (
        "mixed torch.Tensor and DTensor",
        "a parameter is used outside of its sharded model's forward: use it in a method that "
        "torch.distributed.fsdp.register_fsdp_forward_method(model, NAME) knows, or between model.unshard() and "
        "model.reshard()",
    ),
    ("not supported for tensor subclasses", "read what is sharded by its full_tensor()"),
    ("sharding strategy registered", "edit what is sharded by its to_local(), or make it whole by full_tensor()"),
    ("not have been used in the graph", "torch.autograd.grad does not reach sharded parameters: use loss.backward()"),
    ("would remove or reshape sharded dimension", "reshape what is sharded by its to_local(), or its full_tensor()"),
    ("FSDP expects uniform original parameter dtype", "call fully_shard for the modules of each dtype first"),
    (
        "are out of bounds for storage of size 0",
        "for a second pass over a graph call model.set_reshard_after_backward(False)",
    ),
    (
        "norm on an empty tensor",
        "torch has no infinity norm of a process's part that is empty: take the maximum of full_tensor().abs(), and "
        "torch.nn.utils.clip_grads_with_norm_",
    ),
)
"""What torch says of models that are sharded (``--processes-per-worker``), and what to do."""


def with_advice(line: str, sharded: bool = False) -> str:
    """Return an error's line; of torch.distributed, which advises to make a process group, and of sharded models, with
    what to do here."""
    for words, advice in _OF_SHARDED if sharded else ():
        if words in line:
            return f"{line} (with --processes-per-worker: {advice})"
    if not any(word in line for word in ("init_process_group", "torch.distributed", "env:// rendezvous")):
        return line
    return (
        f"{line} (a job of everstep has no process group of its script: remove init_process_group, "
        "DistributedDataParallel, DistributedSampler and calls of torch.distributed; docs/migration.md says what "
        "takes their place)"
    )


def _trim(error: BaseException, script: Path) -> traceback.TracebackException:
    """Return the traceback without our own frames above the script's first."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename != str(script):
        tb = tb.tb_next
    return traceback.TracebackException(type(error), error, tb)


def _exit_status(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    return exit_.code & 0xFF if isinstance(exit_.code, int) else 1


def _tell(request: Fork, error: WorkerError) -> None:
    path = Path(request.error)
    fresh = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        with open(fresh, "wb", opener=private) as file:
            file.write(msgspec.json.encode(error))
        fresh.replace(path)


def _leave(request: Fork, code: int, script: Path) -> int:
    """Do what the interpreter does at its end; an error of everstep in there counts as the script's."""
    hook = sys.unraisablehook
    raised: list[BaseException] = []

    def remember(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, EverstepError):
            raised.append(unraisable.exc_value)
        else:
            hook(unraisable)

    sys.unraisablehook = remember
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's non-daemon threads
    atexit._run_exitfuncs()
    if raised and code == 0:
        code = _failed(request, raised[0], script)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code
