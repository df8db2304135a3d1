from pathlib import Path

from everstep.agent.imports import script_imports


def test_installed_packages_of_script_and_its_local_modules_are_found(tmp_path: Path) -> None:
    (tmp_path / "flights.py").write_text("import json\nimport model\nfrom numpy import linalg\n")
    (tmp_path / "model.py").write_text("import flights\nimport msgspec.json\n")
    script = tmp_path / "train.py"
    script.write_text(
        "from __future__ import annotations\n"
        "import flights\n"
        "try:\n    import click\nexcept ImportError:\n    import does_not_exist_anywhere\n"
        "if True:\n    import pyarrow.parquet as pq\n"
        "def late():\n    import sqlite3\n"
    )
    names = script_imports(script)
    assert {"click", "pyarrow.parquet", "json", "numpy", "msgspec.json"} <= set(names)
    assert not {"flights", "model", "does_not_exist_anywhere", "sqlite3"} & set(names)


def test_type_checking_imports_are_left_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import click\nelse:\n    import msgspec\n"
    )
    assert script_imports(script) == ["typing", "msgspec"]


def test_broken_or_missing_script_gives_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    assert script_imports(script) == []
    script.write_text("import click\ndef (:\n")
    assert script_imports(script) == []
