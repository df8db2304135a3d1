"""What a newcomer reads first is whole: ARCHITECTURE.md, glossary, index of decisions, the reader's questions."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "everstep"
HERE = Path(__file__).parent
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def test_every_file_that_the_page_names_exists() -> None:
    names = set(re.findall(r"`([a-z_]+/[\w./*]+)`", PAGE))
    assert len(names) > 100
    gone = [name for name in sorted(names) if not any(next(base.glob(name), None) for base in (SOURCE, ROOT))]
    assert gone == [], "ARCHITECTURE.md names files that are not there"


def test_every_folder_has_its_sentence() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    told = re.findall(r"^\| `(\w+)/` \| (\w.*) \|$", PAGE, re.M)
    assert {name for name, _ in told} == folders
    assert len(told) == len(folders)


def test_each_question_of_the_reader_has_a_right_answer() -> None:
    questions = json.loads((HERE / "reader_questions.json").read_text())
    assert len({one["question"] for one in questions}) == 20
    for one in questions:
        assert any((ROOT / path).exists() for path in one["files"]), one


def test_the_glossary_has_one_sentence_for_each_word() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    words = [word for word, meaning in rows if meaning.endswith(".")]
    assert len(words) == len(set(words)) > 80
    for word, meaning in rows:
        assert not meaning.endswith(".") or re.search(r"\.\s+[A-Z]", meaning) is None, f"{word}: {meaning}"
    assert "docs/glossary.md" in PAGE


def test_the_index_of_decisions_is_whole() -> None:
    index = runpy.run_path(str(HERE / "decision_index.py"))
    readme = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert index["page"](readme) == readme, "run python tools.py decisions"
    numbers = [number for number, _, _ in index["records"]()]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize(
    ("docstring", "has"),
    [
        ("Return the path.", True),
        ("Returns the path.", True),
        ("A lease is a worker's right to a shard.", True),
        ("Split a step over members.\n\nMore of it.", True),
        ("The path.", False),
        ("What one ps does about mirrors.", False),
        ("Whether it is there.", False),
        ("Shards of all epochs, and what becomes of them.", False),
        ("The shell round the brain: request -> event.", False),
        ("Parts of tensors, and the way back.", False),
        ("One connection, which is closed at the end.", False),
    ],
)
def test_the_rule_for_verbs(docstring: str, has: bool) -> None:
    assert runpy.run_path(str(HERE / "prose.py"))["has_verb"](docstring) == has


def test_words_per_sentence() -> None:
    prose = runpy.run_path(str(HERE / "prose.py"))
    text = "# Head\nOne two three. Four `five six` seven!\n\n- Item one,\n  which goes on\n- Item two\n"
    text += "\n| a | b |\n```\ncode\n```\n"
    assert [prose["words"](one) for one in prose["sentences"](text)] == [3, 3, 5, 2]
