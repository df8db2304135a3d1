"""All commands of the project: ``python tools.py`` lists them, ``python tools.py NAME [ARGUMENT ...]`` runs one.

Arguments that follow a name go to the last command of it. The exit code is that of the first command that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NATIVE = tuple(
    str(p.relative_to(ROOT)) for p in sorted((ROOT / "native").glob("*")) if p.suffix in (".cpp", ".h", ".inc")
)

TASKS: dict[str, tuple[str, list[list[str]]]] = {
    "format": ("format and mend what ruff can", [["ruff", "format", "."], ["ruff", "check", "--fix", "."]]),
    "format-native": ("format the C++ (clang-format)", [["clang-format", "-i", *NATIVE]]),
    "check": ("format, lint, types, import contracts", [[".ci/check"]]),
    "lint-native": (
        "clang-tidy on the C++; builds it for that",
        [
            ["cmake", "-S", ".", "-B", "build/tidy", "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"],
            ["clang-tidy", "--quiet", "-p", "build/tidy", *(n for n in NATIVE if n.endswith(".cpp"))],
        ],
    ),
    "test": ("the default tests (waits a lot: more workers than cores)", [["pytest", "-n", "4"]]),
    "test-thorough": (
        "slow tests too, the sanitizers, and all fuzz targets",
        [
            ["pytest", "-m", "", "-n", "2"],
            ["tests/native/sanitized.sh"],
            ["tests/native/races.sh"],
            [sys.executable, "tests/fuzz/fuzz.py", "--seconds", "60"],
        ],
    ),
    "sanitize": (
        "the C++ under AddressSanitizer and UBSan, then under ThreadSanitizer",
        [["tests/native/sanitized.sh"], ["tests/native/races.sh"]],
    ),
    "fuzz": ("every parser of bytes: [TARGET ...] [--seed N] [--seconds S]", [[sys.executable, "tests/fuzz/fuzz.py"]]),
    "meaning": ("the table of docs/compatibility.md: --whole writes it", [[sys.executable, "tests/meaning"]]),
    "benchmarks": (
        "list the benchmarks, or run one: NAME [--quick] [--record]",
        [[sys.executable, "-m", "benchmarks"]],
    ),
    "marks": ("the marks of docs/benchmarks.md: --write corrects them", [[sys.executable, "-m", "benchmarks._marks"]]),
    "decisions": ("write the list of docs/decisions/README.md", [[sys.executable, "tests/docs/decision_index.py"]]),
    "prose": (
        "words per sentence of pages, first lines of docstrings without a verb: [PAGE|FOLDER ...] [--show]",
        [[sys.executable, "tests/docs/prose.py"]],
    ),
    "sim": ("replay a seed of the simulator: --seed SEED [--mix ps]", [[sys.executable, "-m", "everstep.sim"]]),
}


def listing() -> str:
    """A line for each command."""
    width = max(map(len, TASKS))
    return "\n".join(f"{name:{width}}  {what}" for name, (what, _) in TASKS.items())


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *more = arguments
    if name not in TASKS:
        print(f"no command '{name}': there are {', '.join(TASKS)}", file=sys.stderr)
        return 2
    # Programs of this interpreter's environment come first, as where it is activated.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    commands = TASKS[name][1]
    for command in [*commands[:-1], [*commands[-1], *more]]:
        print("$ " + " ".join(command if len(command) < 12 else [*command[:4], "..."]), file=sys.stderr, flush=True)
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        except FileNotFoundError:
            print(
                f"{command[0]} is not there: install it with pip install -c constraints.txt -e '.[dev,native]'",
                file=sys.stderr,
            )
            return 127
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
