"""``python tests/meaning``: compute cells, record them, write the page."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meaning.command import main

main()
