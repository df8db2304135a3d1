"""On-demand machines that stand in for spot ones, with a real job and a script as its cloud."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_jobs import Run, until
from node_jobs import free_port, join

from everstep.model.member import Role

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

CLOUD = """echo "$@" >> {folder}/calls
case $1 in watch) if mv {folder}/news {folder}/told 2>/dev/null; then cat {folder}/told; fi ;; esac
"""


class Cloud:
    """A source of machines that gives what the test says."""

    def __init__(self, run: Run, at: str) -> None:
        self.run, self.at, self.folder = run, at, run.folder / "cloud"
        self.folder.mkdir()
        self.script = self.folder / "cloud.sh"
        self.script.write_text(CLOUD.format(folder=self.folder))
        (self.folder / "calls").touch()

    def called(self, words: str) -> bool:
        return words in (self.folder / "calls").read_text().splitlines()

    def grant(self, node: str, market: str) -> None:
        part = self.folder / "part"
        part.write_text(json.dumps({"what": "granted", "node": node, "class": "g5", "market": market}))
        news: Path = self.folder / "news"
        until(lambda: not news.exists())
        part.replace(news)
        join(self.run, self.at, node, "--market", market)


def test_a_job_that_waits_for_spot_gets_an_on_demand_machine_and_gives_it_back(run: Run) -> None:
    run.write(epochs=80, pause_s=0.5)
    at = f"127.0.0.1:{free_port()}"
    cloud = Cloud(run, at)
    capacity = ("--bind", at, "--capacity", f"command:sh {cloud.script}", "--capacity-nodes", "2")
    run.start("--min-workers", "2", "--fallback", "1s", "--stabilization", "1s", "--reliable", "master,ps", *capacity)
    popen = run.popen
    assert popen is not None
    asked = ("request 1 on_demand", "request 2 on_demand")  # (2: its own worker had not begun)
    until(lambda: any(map(cloud.called, asked)) or popen.poll() is not None, why=run.story)
    assert popen.poll() is None, run.story()
    cloud.grant("od1", "on_demand")
    run.alive(Role.WORKER, 1)
    run.trained(200)
    assert not cloud.called("release od1")
    cloud.grant("sp1", "spot")
    until(
        lambda: popen.poll() is not None or (cloud.called("release od1") and cloud.called("request 0 on_demand")),
        why=run.story,
    )
    assert run.alive_on("sp1").state == "alive"
    status = run.status()
    assert status is not None and status.supervision is not None and not status.supervision.on_demand
    run.hurry()
    run.ended_well()
    run.check_audit()
    code, text = run.everstep("explain", str(run.run_dir))
    assert code == 0 and "ask for on-demand" in text and "back to spot" in text, text
