"""Runs a benchmark: ``python -m benchmarks`` lists them, ``python -m benchmarks NAME [--quick]`` runs one.

A benchmark is a file here with ``run(quick: bool) -> {"figures", "aims", "holds", "spread"}``: numbers by name, what
they should be, whether they are, and their lowest and highest value over the rounds. Progress goes to standard output;
the last line is one JSON object with all of it, its name, the date and the machine. Exit code 0 if all aims hold,
1 if not, 2 for a wrong name. ``--quick`` ends within two minutes and says less. Some have flags of their own,
which their files name: ``run(quick, arguments)``.

A figure ``NAME.aa`` is the noise of figure ``NAME``: one side was measured twice in each round, and this is the ratio.
It stands beside its claim. The result also says how many rounds there were, the load before each, and whether the
machine was quiet (all loads below 0.5). ``--record`` writes the result with what was measured in each round to
``benchmarks/results/NAME-DATE.json``, and waits before each round until the machine is quiet, at most ten minutes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import QUICK_S, begin, machine

HERE = Path(__file__).parent
RESULTS = HERE / "results"


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
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/NAME-DATE.json")
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
    conditions = begin(wait=args.record and not args.quick, limit_s=QUICK_S if args.quick else float("inf"))
    result = run(args.quick, arguments=more) if more else run(args.quick)
    took = time.monotonic() - began
    figures, spreads = result["figures"], result["spread"]
    for name, value in figures.items():
        if name.endswith(".aa") and name.removesuffix(".aa") in figures:
            continue
        aim = f"  aim {result['aims'][name]}" if name in result["aims"] else ""
        verdict = {True: "  holds", False: "  DOES NOT HOLD"}.get(result["holds"].get(name), "")
        noise = f"{name}.aa"
        aa = f"  A/A {shown(figures[noise])}{_between(spreads.get(noise))}" if noise in figures else ""
        print(f"{name:44} {shown(value):>12}{_between(spreads.get(name))}{aa}{aim}{verdict}")
    facts = conditions.facts()
    word = "quiet" if facts["quiet"] else "not quiet"
    loads = [facts["load_began"], *facts["loads"]]
    print(f"{facts['rounds']} round(s), machine {word}: load {min(loads)} .. {max(loads)}")
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "quick": args.quick, "took_s": round(took, 1)}
    whole = {"name": args.name, "arguments": more, **result, **about, **facts}
    if args.record:
        print(f"recorded in {record({**whole, 'raw': conditions.raw}, RESULTS)}")
    print(json.dumps(whole))
    return 0 if all(result["holds"].values()) else 1


def record(result: dict[str, Any], folder: Path) -> Path:
    """Write a result to ``NAME-DATE.json``, or ``NAME-DATE-2.json`` and so on if there is one."""
    folder.mkdir(exist_ok=True)
    stem, number = f"{result['name']}-{result['date']}", 1
    while True:
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with path.open("x") as file:
                file.write(json.dumps(result, indent=1, default=str) + "\n")
            return path
        except FileExistsError:
            number += 1


def _between(ends: Sequence[float] | None) -> str:
    return f"  ({shown(ends[0])} .. {shown(ends[1])})" if ends else ""


def shown(value: object) -> str:
    """A figure as rows of docs/benchmarks.md have it."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
