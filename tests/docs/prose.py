"""Measures prose: ``python tools.py prose [PAGE|FOLDER ...] [--show]``.

Pages (``*.md``): words per sentence of paragraphs and items of lists. Headings, code and tables are left out.
A sentence ends at ``.``, ``?`` or ``!`` before white space, and at the end of its paragraph or item. A piece
of code in a sentence is one word.

Sources (``*.py``): docstrings whose first line has no verb. It has one if the docstring's first sentence
begins with a verb ("Return ...", "Returns ..."), or if a verb stands in it outside of a subordinate clause.
Such a clause begins with ``what``, ``who``, ``that``, ``whether``, ``if`` and the like, and ends at the next
comma, semicolon or colon. The words are listed in ``verbs.txt``. A module's docstring counts like others.

``--show`` prints each sentence of more than 30 words, and each first line without a verb.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "AGENTS.md", "CONTRIBUTING.md", "docs")
RECORDS = ("docs/benchmarks.md", "docs/compatibility.md", "docs/third-party.md", "docs/decisions")
"""Pages that programs write, or that are records of their day: measured only if named."""
LONG_WORDS = 30

_LISTS: dict[str, frozenset[str]] = {}
for _part in (Path(__file__).parent / "verbs.txt").read_text().split("\n[")[1:]:
    _name, _, _words = _part.partition("]")
    _LISTS[_name] = frozenset(_words.split())
VERBS = _LISTS["verbs"]
"""In their base form."""
FINITE = _LISTS["finite"]
"""Verbs that are told by their form alone."""
CLAUSES = _LISTS["clauses"]
"""A subordinate clause begins with one of these."""
NOUNS = _LISTS["nouns"]
"""Forms with -s that are nouns as often as verbs: they count between a subject and one of ``OBJECTS``."""
OBJECTS = _LISTS["objects"]
_BEHIND_NOUNS = frozenset(
    ("of", "that", "which", "and", "in", "for", "from", "with", "by", "on", "to", "at", "as", "whose")
)
_SUBJECTS = frozenset(("a", "an", "the", "one", "this", "it", "code", "each"))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of the paragraphs and list items of a page."""
    text = re.sub(r"^```.*?^```\n?", "\n", text, flags=re.M | re.S)
    blocks: list[str] = []
    fresh = True
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("#", "|", "![", "<")):
            fresh = True
            continue
        item = re.match(r"(?:[-*]|\d+\.)\s+", bare)
        if fresh or item:
            blocks.append("")
        blocks[-1] += " " + (bare[item.end() :] if item else bare)
        fresh = False
    for block in blocks:
        plain = re.sub(r"``?[^`]+``?", "code", block)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = re.sub(r"\b(e\.g|i\.e|etc|vs)\.", r"\1", plain)
        for one in re.split(r"(?<=[.?!])[\"')*_]*\s+", plain):
            if words(one):
                yield one.strip()


def words(text: str) -> int:
    """Return how many words ``text`` has."""
    return len(re.findall(r"[A-Za-z0-9][\w'’.,:/%+=-]*", text))


def first_sentence(docstring: str) -> str:
    """Return what stands before the first full stop, colon or semicolon, or in the first paragraph."""
    paragraph = " ".join(docstring.strip().partition("\n\n")[0].split())
    plain = re.sub(r"``?[^`]+``?", "Code", paragraph)
    plain = re.sub(r"\([^()]*\)", "", plain)
    return re.split(r"(?<=[.?!;])\s|(?<=[.?!;])$", plain)[0]


def has_verb(docstring: str) -> bool:
    """Return whether the first sentence of a docstring has a verb in its main clause (see the top of this file)."""
    sentence = first_sentence(docstring)
    clauses = re.split(r"[,;:]\s", sentence)
    for number, clause in enumerate(clauses):
        found = re.findall(r"[A-Za-z][A-Za-z']*", clause)
        if not found:
            continue
        low = [word.lower() for word in found]
        first = number == 0 or clauses[0] == "Code"
        begins = first and (low[0] in VERBS or (low[0].endswith("s") and _base(low[0])))
        if begins and not (low[0] in NOUNS and low[1:2] and low[1] in _BEHIND_NOUNS):
            return True
        if low[0] in CLAUSES:
            continue
        for i, word in enumerate(low):
            if word in CLAUSES:
                break
            if word in FINITE or (i and word.endswith("s") and _base(word) and word not in NOUNS):
                return True
            if i > 1 and word in NOUNS and low[0] in _SUBJECTS and low[i + 1 : i + 2] and low[i + 1] in OBJECTS:
                return True
    return False


def _base(word: str) -> bool:
    return any(stem in VERBS for stem in (word, word[:-1], word[:-2], word[:-3] + "y"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring of a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def measure_page(path: Path) -> tuple[int, int, list[str]]:
    """Return sentences, words and long sentences of a page."""
    found = list(sentences(path.read_text()))
    return len(found), sum(map(words, found)), [one for one in found if words(one) > LONG_WORDS]


def files_of(names: list[str]) -> list[Path]:
    """Return the pages and sources that are named, or those that are measured by default."""
    if not names:
        pages = [path for name in PAGES for path in _under(ROOT / name, "*.md")]
        return [p for p in pages if not str(p.relative_to(ROOT)).startswith(RECORDS)] + _under(ROOT / "src", "*.py")
    return [path for name in names for kind in ("*.md", "*.py") for path in _under(Path(name).resolve(), kind)]


def _under(path: Path, pattern: str) -> list[Path]:
    return sorted(path.rglob(pattern)) if path.is_dir() else [path] if path.match(pattern) else []


def main(arguments: list[str]) -> int:
    show = "--show" in arguments
    files = files_of([one for one in arguments if one != "--show"])
    total_sentences = total_words = 0
    for path in (p for p in files if p.suffix == ".md"):
        count, n_words, long = measure_page(path)
        total_sentences, total_words = total_sentences + count, total_words + n_words
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        mean = n_words / max(count, 1)
        print(f"{name}: {mean:.1f} words per sentence, {count} sentences, {len(long)} of more than {LONG_WORDS}")
        for one in long if show else ():
            print(f"    {words(one)}: {one}")
    if total_sentences:
        print(f"all pages: {total_words / total_sentences:.1f} words per sentence")
    rooms: dict[str, list[int]] = {}
    for path in (p for p in files if p.suffix == ".py"):
        for line, text in docstrings(path):
            count = rooms.setdefault(path.parent.name, [0, 0])
            count[0] += 1
            if not has_verb(text):
                count[1] += 1
                if show:
                    print(f"{path}:{line}: {text.splitlines()[0]}")
    for room, (n, bad) in sorted(rooms.items()):
        print(f"{room}: {bad} of {n} docstrings have no verb in their first line")
    if rooms:
        bad, n = sum(b for _, b in rooms.values()), sum(n for n, _ in rooms.values())
        print(f"all sources: {bad} of {n} docstrings have no verb in their first line")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
