"""Which installed packages a script imports: read from its source, nothing is run."""

from __future__ import annotations

import ast
import importlib.util
import site
import sys
import sysconfig
from pathlib import Path

_MAX_FILES = 64  # local modules followed


def script_imports(script: Path) -> list[str]:
    """Return dotted names of installed (or standard) modules that ``script`` and its local modules import, in order.

    Local modules (beside the script) are followed but never named: they may change, and must run in the worker.
    Unreadable or malformed files give nothing: the worker will show their error."""
    names: dict[str, None] = {}
    todo, seen = [script], {script}
    while todo and len(seen) <= _MAX_FILES:
        for name in _imported(todo.pop(0)):
            top = name.partition(".")[0]
            local = [script.parent / f"{top}.py", script.parent / top / "__init__.py"]
            found = [p for p in local if p.is_file()]
            if found:
                fresh = [p for p in found if p not in seen]
                seen.update(fresh)
                todo.extend(fresh)
            elif is_installed(top):
                names.setdefault(name)
    return list(names)


def _imported(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    return names


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """Return statements that run at import: not the bodies of functions, nor of ``if TYPE_CHECKING``."""
    found: list[ast.stmt] = []
    stack: list[ast.stmt] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack.extend(reversed(node.orelse))
            continue
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        for handler in getattr(node, "handlers", ()):
            inner.extend(handler.body)
        stack.extend(reversed(inner))
    return found


def is_installed(top: str) -> bool:
    """Return whether the top-level module is the standard library's or lies in a site-packages directory."""
    if top in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    where = spec.origin if spec.origin not in (None, "namespace") else None
    if where is None:
        where = next(iter(spec.submodule_search_locations or ()), None)
    if where is None:
        return False
    path = Path(where).resolve()
    return any(path.is_relative_to(root) for root in _site_roots())


def _site_roots() -> list[Path]:
    roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        roots.append(site.getusersitepackages())
    return [Path(root).resolve() for root in dict.fromkeys(roots)]
