"""Settings of jobs on Ray and Slurm: what is refused in one line, and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.cli import cluster_platform
from everstep.config.load import load_spec, read_spec, save_spec
from everstep.data.source import open_source
from everstep.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"capacity": "cloud"}, "there are trace:FILE, command:WORDS, ray[:HOST:PORT] and slurm"),
        ({"capacity": "slurm:here"}, "slurm takes no address: SLURM_CONF says where it is"),
        ({"slurm_partition": "spot"}, "slurm_partition = 'spot' (--slurm-partition): needs --on slurm"),
        ({"slurm_time": "1", "capacity": "ray"}, "needs --on slurm"),
        ({"node_gpus": 1}, "node_gpus = 1 (--node-gpus): needs --on ray or --on slurm"),
        ({"slurm_options": "--mem='", "capacity": "slurm"}, "No closing quotation"),
        ({"slurm_steps": True}, "needs --on slurm"),
        ({"slurm_steps": True, "capacity": "slurm", "slurm_partition": "spot"}, "give it to sbatch"),
        ({"capacity": "slurm", "capacity_workers": 2}, "needs capacity: trace:FILE"),
    ],
)
def test_refusals(flags: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_spec(None, {"script": "x.py", **flags}, {})
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spec, _ = load_spec(None, {"script": "x.py", "capacity": "slurm"}, {})
    with pytest.raises(ConfigError, match="sbatch is not installed here: run this on a login node"):
        cluster_platform.on_cluster(spec)


def test_what_follows_is_kept_in_the_run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from everstep.platforms import slurm_cluster

    monkeypatch.setattr(slurm_cluster, "check_slurm", lambda settings: {})
    flags = {"script": "x.py", "capacity": "slurm", "nodes": 3, "workers": 5, "ps": 3}
    spec, origins = load_spec(None, flags, {})
    spec = cluster_platform.on_cluster(spec)
    assert spec.master_alone and (spec.nodes, spec.capacity_nodes) == (4, 3)
    assert (spec.capacity_workers, spec.capacity_ps) == (2, 1)
    assert cluster_platform.slurm_settings(spec).cpus == 3
    save_spec(tmp_path, spec, origins)
    assert read_spec(tmp_path) == spec and not cluster_platform.has_begun(tmp_path)
    with pytest.raises(ConfigError, match=r"nodes = 9: more than there are workers and ps \(5 \+ 3\)"):
        cluster_platform.on_cluster(load_spec(None, {**flags, "nodes": 9}, {})[0])


def test_a_dataset_of_ray_data_is_refused() -> None:
    fake = type("Dataset", (), {"__module__": "ray.data.dataset"})
    with pytest.raises(DataError, match=r"write it once \(dataset.write_parquet\(PATH\)\) and give its files"):
        open_source(fake())
