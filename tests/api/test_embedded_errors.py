"""A user's mistake in a script that runs alone: one line, the right exit code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedded import run_embedded

pytestmark = pytest.mark.processes

_HEAD = "import numpy as np\nimport everstep as es\njob = es.join(run_dir='run')\n"


@pytest.mark.parametrize(
    ("body", "words", "code"),
    [
        ("job.loader({'x': np.arange(8)}, batch_size=0)\n", ("batch_size=0", "train.py:4"), 2),
        ("job.loader('missing.parquet', batch_size=4).plan()\n", ("missing.parquet", "train.py:4"), 2),
        ("job.steps(3).__next__()\n", ("job.steps", "train.py:4"), 1),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, body: str, words: tuple[str, ...], code: int) -> None:
    (tmp_path / "train.py").write_text(_HEAD + body)
    done = run_embedded(tmp_path, 60.0)
    lines = [line for line in done.stderr.splitlines() if line.startswith("everstep: ")]
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) == 1 and all(word in lines[0] for word in words), done.stderr


def test_other_errors_stay_pythons(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_HEAD + "raise KeyError('mine')\n")
    done = run_embedded(tmp_path, 60.0)
    assert done.returncode == 1 and "Traceback" in done.stderr and "KeyError: 'mine'" in done.stderr
