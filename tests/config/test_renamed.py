"""Old names of settings work for one version more, wherever they are given, and say so in one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.config.load import load_spec, read_spec, save_spec
from everstep.config.renamed import SETTINGS
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError

ALLREDUCE = {"mode": "allreduce", "workers": 2}


def test_a_flag_by_its_old_name() -> None:
    told: list[str] = []
    spec, origins = load_spec(None, {**ALLREDUCE, "shard": 2}, {}, told.append)
    assert spec.processes_per_worker == 2 and origins["processes_per_worker"] == "--shard"
    assert told == ["--shard is now --processes-per-worker; the old name works until everstep 0.2"]
    with pytest.raises(ConfigError, match="--shard and --processes-per-worker are one setting"):
        load_spec(None, {**ALLREDUCE, "shard": 2, "processes_per_worker": 2}, {}, told.append)


def test_the_environment_and_the_file_by_their_old_names(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "job.yaml"
    path.write_text("ps: 2\nbuckets: 32\n")
    spec, _ = load_spec(path, {}, {"EVERSTEP_BUCKETS": "16"}, told.append)
    assert spec.partitions == 16
    assert told == [
        f"{path} line 2: buckets is now partitions; the old name works until everstep 0.2",
        "EVERSTEP_BUCKETS is now EVERSTEP_PARTITIONS; the old name works until everstep 0.2",
    ]
    path.write_text("partitions: 8\nbuckets: 32\n")
    with pytest.raises(ConfigError, match="line 2: partitions was given in line 1 already"):
        load_spec(path, {}, {}, told.append)
    with pytest.raises(ConfigError, match="EVERSTEP_BUCKETS and EVERSTEP_PARTITIONS are one setting"):
        load_spec(None, {}, {"EVERSTEP_BUCKETS": "16", "EVERSTEP_PARTITIONS": "16"}, told.append)


def test_the_new_names_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    spec, _ = load_spec(None, {**ALLREDUCE, "processes_per_worker": 2, "partitions": 8}, {})
    assert (spec.processes_per_worker, spec.partitions) == (2, 8)
    assert capsys.readouterr() == ("", "")
    load_spec(None, {**ALLREDUCE, "shard": 2}, {})
    assert capsys.readouterr().err.startswith("everstep: --shard is now --processes-per-worker")


@pytest.mark.parametrize(("old", "new"), [("nondedicated", "shared"), ("dedicated", "exclusive")])
def test_policies_have_both_names(old: str, new: str) -> None:
    told: list[str] = []
    assert load_spec(None, {**ALLREDUCE, "policy": old}, {}, told.append)[0].policy == new
    assert told == []


def test_run_directories_keep_the_names_that_they_had(tmp_path: Path) -> None:
    spec = JobSpec(mode="allreduce", ps=0, processes_per_worker=3, partitions=16)
    save_spec(tmp_path, spec, {})
    written = msgspec.json.decode((tmp_path / "job.json").read_bytes())["spec"]
    assert (written["shard"], written["buckets"]) == (3, 16) and not set(SETTINGS.values()) & set(written)
    assert read_spec(tmp_path) == spec
