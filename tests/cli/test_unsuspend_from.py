"""``everstep unsuspend URL`` says in one line what is wrong, and leaves nothing that keeps the next attempt from going
on."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cli.suspend import MovedTo, take_here, unsuspend
from everstep.config.load import save_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError
from everstep.storage.journal import Journal
from everstep.storage.places import LocalPlace
from everstep.storage.suspended_job import keep_suspended, mark_taken, read_suspended


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    """A place with a suspended job, whose script is not on this machine any more."""
    old = tmp_path / "old"
    (old / "audit").mkdir(parents=True)
    (old / "secret").write_text("x")
    (old / "summary.json").write_text('{"phase": "suspended", "exit_code": 0, "suspensions": 2}')
    save_spec(old, JobSpec(name="flights", script=str(old / "gone.py"), checkpoint_to=str(tmp_path / "place")), {})
    Journal(old / "journal.sqlite", 1).close()
    found = LocalPlace(tmp_path / "place")
    keep_suspended(found, old, "flights", 2)
    return found


def test_a_place_without_a_suspended_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no suspended job is kept there; everstep resume"):
        unsuspend(f"file://{tmp_path}", False)


def test_options_of_another_machine_are_refused_in_the_run_directory(tmp_path: Path) -> None:
    save_spec(tmp_path, JobSpec(script="train.py"), {})
    with pytest.raises(ConfigError, match="--run-dir, --script and --bind are for the URL"):
        unsuspend(tmp_path, False, None, MovedTo(script="other.py"))


def test_a_script_that_is_not_here_leaves_the_job_to_be_taken(tmp_path: Path, place: LocalPlace) -> None:
    new = tmp_path / "new"
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"gone.py' does not exist"):
            unsuspend(place.url, False, None, MovedTo(run_dir=str(new)))
    index = read_suspended(place)
    assert index is not None and index.taken is None, "another attempt may still take it"
    (tmp_path / "here.py").write_text("import everstep")
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        unsuspend(place.url, False, None, MovedTo(str(new), str(tmp_path / "here.py"), "nonsense"))


def test_a_job_that_went_on_is_not_taken_twice(tmp_path: Path, place: LocalPlace) -> None:
    mark_taken(place, 2, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"not suspended any more: it went on at .*elsewhere"):
        unsuspend(place.url, False, None, MovedTo(run_dir=str(tmp_path / "new")))
    spec = JobSpec(checkpoint_to=place.url)
    with pytest.raises(ConfigError, match="not suspended any more"):
        take_here(spec, tmp_path / "old", 2)
    take_here(spec, tmp_path / "old", 3)  # (what is kept there is of an earlier suspension)


def test_what_is_kept_is_of_that_suspension(tmp_path: Path, place: LocalPlace) -> None:
    old = tmp_path / "old"
    (old / "summary.json").write_text('{"phase": "done", "exit_code": 0}')
    keep_suspended(place, old, "flights", 2)
    (tmp_path / "here.py").write_text("import everstep")
    with pytest.raises(EverstepError, match="not of suspension 2"):
        unsuspend(place.url, False, None, MovedTo(str(tmp_path / "new"), str(tmp_path / "here.py")))
