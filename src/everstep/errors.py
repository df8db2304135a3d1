"""Has one tree of errors, split by who must act. Each ends the command with its exit code.

A message is one line: what, with the value, and what to do about it.
Exit codes: 0 done, 1 user code, 2 usage or config, 3 our bug, 4 infrastructure gave up, 5 the result is lost,
6 replicas differ, 130 interrupted (Ctrl-C, the terminal closed), 143 interrupted by SIGTERM.
"""

from __future__ import annotations

from pathlib import Path


class EverstepError(Exception):
    """Is the base of all errors that everstep raises on purpose. ``str(error)`` is one line for a person."""

    exit_code = 3


class UserError(EverstepError):
    """The user can fix it: the script, the spec, a flag, a file."""

    exit_code = 2


class ScriptError(UserError):
    """Says that the training script failed, or used the API in a way that cannot work."""

    exit_code = 1


class ConfigError(UserError):
    """job.yaml, a flag or an environment variable is wrong."""


class DataError(UserError):
    """A data file, column or value is wrong."""


class NonFiniteGradientError(ScriptError):
    """Says that a gradient holds NaN or Inf; nothing of its batch was applied."""


class PlatformError(EverstepError):
    """Says what is wrong with the machine or the platform: a port in use, no disk space, no permission."""

    exit_code = 4


class CheckpointError(UserError):
    """Says that a checkpoint that was asked for is not there, not whole, or of another job or version."""


class UntrustedError(CheckpointError):
    """Says that nobody who has the job's key has written a checkpoint."""


class StorageError(PlatformError):
    """A place for checkpoints does not take or give a file. ``passing``: trying again later may help."""

    def __init__(self, text: str, passing: bool = True) -> None:
        super().__init__(text)
        self.passing = passing


class FencedError(EverstepError):
    """This process was replaced; whatever it still wants to change is refused."""

    exit_code = 4


class WireError(EverstepError):
    """A peer broke the protocol, or could not prove that it knows the job's secret."""

    exit_code = 4


class DeadlineError(EverstepError):
    """Something did not answer in time; says what, and for how long it was asked."""

    exit_code = 4


class ServerLostError(EverstepError):
    """A parameter server is gone and nothing protects what it held."""

    exit_code = 4


class InternalError(EverstepError):
    """An invariant of everstep itself is broken; please report it with the run directory."""

    exit_code = 3


class ReplicasDifferError(InternalError):
    """Says that workers that must hold the same state hold different ones; nothing of the step was applied."""

    exit_code = 6


def script_place(error: BaseException, script: Path) -> str:
    """Return ``file:line`` of the innermost frame in the script's directory: where the user has to look."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    here = str(script.resolve().parent)
    place = script.name
    tb = error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if name == str(script) or (name.startswith(here + "/") and "site-packages" not in name):
            place = f"{Path(name).name}:{tb.tb_lineno}"
        tb = tb.tb_next
    return place


def escaped(text: str, most: int = 2000) -> str:
    """Return ``text`` for a log or a terminal: control characters (new lines, escapes) shown as ``\x1b``, cut at
    ``most``."""
    shown = text if text.isprintable() else "".join(c if c.isprintable() else _shown(c) for c in text)
    return shown if len(shown) <= most else f"{shown[:most]}... ({len(shown):,} characters)"


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode()


def escaped_lines(text: str, most: int = 100_000) -> str:
    """Do as ``escaped`` does, but lines stay lines: for what may have several, such as a traceback."""
    return "\n".join(escaped(line.expandtabs(), most) for line in text.split("\n"))
