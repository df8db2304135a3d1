"""Every transcript says what the brain does. See transcript.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from transcript import run_transcript  # noqa: E402

FILES = sorted((HERE / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    now = run_transcript(text)
    if os.environ.get("EVERSTEP_REWRITE"):
        path.write_text(now)
        return
    assert now == text
