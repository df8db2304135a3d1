"""torchrun's variables in a worker's environment, where the job asks for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from local_jobs import Run

from everstep.allreduce.environment import torchrun_environment
from everstep.config.load import load_spec
from everstep.errors import ConfigError
from everstep.model.member import Role

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_the_variables_of_a_worker() -> None:
    told = torchrun_environment(3, 1, workers=4, places=2)
    assert told == dict(zip(NAMES, ("3", "4", "1", "2", None, None), strict=True))
    later = torchrun_environment(6, 2, workers=4, places=2)
    assert (later["WORLD_SIZE"], later["LOCAL_WORLD_SIZE"]) == ("7", "3"), "no rank is beyond the world"


@pytest.mark.parametrize(
    "flags",
    [{"mode": "allreduce", "ps": 0, "processes_per_worker": 2}, {"mode": "pipeline", "ps": 0, "stages": 2}],
)
def test_workers_of_several_processes_have_none(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"torchrun_env = true.*: a worker of 2 processes has no RANK") as caught:
        load_spec(None, {**flags, "torchrun_env": True}, {})
    assert "\n" not in str(caught.value)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_scripts_find_them_and_a_replacement_has_the_same(run: Run, tmp_path: Path) -> None:
    run.write()
    shown = f"print('found', *(os.environ.get(n, 'none') for n in {NAMES}), flush=True)\n"
    run.script.write_text(run.script.read_text().replace("job = es.join()\n", f"{shown}job = es.join()\n"))
    config = tmp_path / "job.yaml"
    config.write_text("torchrun_env: true\n")
    run.start("-c", str(config), "--workers", "2", "--ps", "1")
    os.kill(run.alive(Role.WORKER, 1).pid, signal.SIGKILL)
    run.alive(Role.WORKER, 1, at_least=2)
    run.hurry()
    run.ended_well()
    found = [line for line in (run.run_dir / "logs" / "worker-1.log").read_text().splitlines() if "found" in line]
    assert found and all(line.endswith("found 1 2 1 2 none none") for line in found), found
