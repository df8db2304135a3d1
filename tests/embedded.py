"""Runs of ``python train.py``: a job in one process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_embedded(folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """``train.py`` of ``folder``, to its end."""
    command = [sys.executable, "-X", "fork", "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
