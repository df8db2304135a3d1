"""Runs a benchmark: ``python -m benchmarks`` lists them, ``python -m benchmarks NAME [--quick]`` runs one.

A benchmark is a file here with ``run(quick: bool) -> {"figures", "aims", "holds", "spread"}``: numbers by name, what
they should be, whether they are, and their lowest and highest value over the rounds. Progress goes to standard output;
the last line is one JSON object with all of it, its name, the date and the machine. Exit code 0 if all aims hold,
1 if not, 2 for a wrong name. ``--quick`` ends within two minutes and says less. Some have flags of their own,
which their files name: ``run(quick, arguments)``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
import time
from pathlib import Path

from benchmarks._measure import machine

HERE = Path(__file__).parent


def available() -> dict[str, str]:
    """Benchmarks by name, with the first line of their docstring. Read from the source: nothing is imported."""
    found: dict[str, str] = {}
    for path in sorted(HERE.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a benchmark, or list them.")
    parser.add_argument("name", nargs="?")
    parser.add_argument("--quick", action="store_true", help="within two minutes, fewer rounds")
    args, more = parser.parse_known_args(arguments)
    names = available()
    if args.name is None:
        width = max((len(name) for name in names), default=0)
        for name, line in names.items():
            print(f"{name:{width}}  {line}")
        return 0
    if args.name not in names:
        print(f"no benchmark '{args.name}': there are {', '.join(names)}", file=sys.stderr)
        return 2
    run = importlib.import_module(f"benchmarks.{args.name}").run
    if more and "arguments" not in inspect.signature(run).parameters:
        parser.error(f"{args.name} has no flags but --quick: {' '.join(more)}")
    began = time.monotonic()
    result = run(args.quick, arguments=more) if more else run(args.quick)
    took = time.monotonic() - began
    for name, value in result["figures"].items():
        low, high = result["spread"].get(name, (None, None))
        between = f"  ({_number(low)} .. {_number(high)})" if low is not None else ""
        aim = f"  aim {result['aims'][name]}" if name in result["aims"] else ""
        verdict = {True: "  holds", False: "  DOES NOT HOLD"}.get(result["holds"].get(name), "")
        print(f"{name:44} {_number(value):>12}{between}{aim}{verdict}")
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "quick": args.quick, "took_s": round(took, 1)}
    print(json.dumps({"name": args.name, **result, **about}))
    return 0 if all(result["holds"].values()) else 1


def _number(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
