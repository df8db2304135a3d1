"""The Promela models hold at small scope, every state of them, and each planted bug in them is found.

Needs ``spin`` and ``gcc`` (Debian: ``apt-get install spin gcc``); skipped where they are not there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "models"
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: the models are not searched"
)

GOOD = [
    ("parity_cut", ()),
    ("parity_cut", ("PUSHES=1", "CHANGES_OF_Y=1")),
    ("bucket_move", ()),
    ("bucket_move", ("NO_REPLICA",)),
    ("mirror_lag", ()),
]
BUGS = [
    ("parity_cut", "ACKED_AT_ONCE", ("PUSHES=2",)),
    ("parity_cut", "ACKED_BY_ONE_MIRROR", ("PUSHES=2",)),
    ("parity_cut", "REPEAT_ACKED_AT_ONCE", ("PUSHES=2",)),
    ("parity_cut", "APPLIES_REPEATS", ("PUSHES=2",)),
    ("parity_cut", "TAIL_GOES_AT_ONCE", ("PUSHES=2",)),
    ("parity_cut", "NO_LEVELLING", ("PUSHES=2",)),
    ("parity_cut", "TAIL_DOES_NOT_FENCE", ("PUSHES=2",)),
    ("parity_cut", "OLD_TAIL_IS_ANSWERED", ("PUSHES=2",)),
    ("parity_cut", "OWN_MIRROR_NOT_FENCED", ("PUSHES=2",)),
    ("parity_cut", "PROMOTES_BEFORE_FOLDED", ("PUSHES=2",)),
    ("parity_cut", "PROMOTES_DROPPED_MIRROR", ("PUSHES=2",)),
    ("parity_cut", "FOLD_MISSES_CHANGES", ("PUSHES=1", "CHANGES_OF_Y=1")),
    ("parity_cut", "FOLD_TAKES_ALL_CHANGES", ("PUSHES=1", "CHANGES_OF_Y=1")),
    ("parity_cut", "CONTENTS_TWICE", ("PUSHES=1", "CHANGES_OF_Y=1")),
    ("bucket_move", "NO_LEVELLING", ("PUSHES=2",)),
    ("bucket_move", "SWITCHES_EARLY", ("PUSHES=2",)),
    ("bucket_move", "GOES_BACK", ("PUSHES=2",)),
    ("bucket_move", "DROPS_EARLY", ("PUSHES=2", "NO_REPLICA")),
    ("bucket_move", "CONTENTS_TWICE", ("PUSHES=2", "NO_REPLICA")),
    ("bucket_move", "CONTENTS_BESIDE_THE_STREAM", ("PUSHES=2", "NO_REPLICA")),
    ("bucket_move", "SERVES_AFTER_HAND_OVER", ("PUSHES=2", "NO_REPLICA")),
    ("bucket_move", "NO_HAND_OVER", ("PUSHES=2", "NO_REPLICA")),
    ("mirror_lag", "NEWEST_PUSH_ONLY", ("PUSHES=2",)),
    ("mirror_lag", "OLD_MARKS", ("PUSHES=2",)),
    ("mirror_lag", "KEEPS_OLD_RECORDS", ("PUSHES=2",)),
    ("mirror_lag", "OPENED_LATER", ("PUSHES=2",)),
    ("mirror_lag", "NO_LEVELLING", ("PUSHES=2",)),
    ("mirror_lag", "LEVELLING_DOES_NOT_FENCE", ("PUSHES=2",)),
    ("mirror_lag", "LOSS_COSTS_NOTHING", ("PUSHES=2",)),
    ("mirror_lag", "DONE_OF_A_ZOMBIE", ("PUSHES=2",)),
    ("mirror_lag", "RELEASED_WHEN_DONE", ("PUSHES=2",)),
    ("mirror_lag", "RELEASED_WHEN_SENT", ("PUSHES=2",)),
    ("mirror_lag", "RELEASED_BY_ONE_MIRROR", ("PUSHES=2",)),
]


def search(model: str, defines: tuple[str, ...], folder: Path, optimise: str) -> tuple[int, str]:
    """Errors that an exhaustive search of ``model`` finds, and what it printed. Fails if it was not exhaustive."""
    flags = [f"-D{d}" for d in defines]
    made = subprocess.run(
        ["spin", *flags, "-a", str(MODELS / f"{model}.pml")], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0 and (folder / "pan.c").exists(), made.stdout + made.stderr
    build = ["gcc", optimise, "-w", "-DSAFETY", "-DMEMLIM=2000", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=folder, check=True, timeout=120)
    done = subprocess.run(
        ["./pan", "-m100000", "-E", *([] if optimise == "-O1" else ["-w18"])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    found = re.search(r"errors: (\d+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    errors = int(found[1])
    assert errors or ("max search depth too small" not in done.stdout and "MEMLIM" not in done.stdout), done.stdout
    return errors, done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "defines"), GOOD, ids=lambda v: v if isinstance(v, str) else " ".join(v) or "all")
def test_the_model_holds_in_every_state(model: str, defines: tuple[str, ...], tmp_path: Path) -> None:
    errors, text = search(model, defines, tmp_path, "-O1")
    assert errors == 0, text
    stored = re.search(r"(\d+) states, stored", text)
    assert stored is not None and int(stored[1]) > 10_000, text  # else it did not get anywhere


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "bug", "defines"), BUGS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_planted_bug_is_found(model: str, bug: str, defines: tuple[str, ...], tmp_path: Path) -> None:
    errors, text = search(model, (bug, *defines), tmp_path, "-O0")
    assert errors == 1, text
    assert "assertion violated" in text


def test_every_bug_of_the_models_is_in_the_list() -> None:
    for model in ("parity_cut", "bucket_move", "mirror_lag"):
        switches = set(re.findall(r"^#ifn?def (\w+)", (MODELS / f"{model}.pml").read_text(), re.MULTILINE))
        listed = {bug for name, bug, _ in BUGS if name == model}
        assert switches - listed <= {"PUSHES", "CHANGES_OF_Y", "NO_REPLICA", "MAX_LOSSES"}
