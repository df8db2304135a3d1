"""docs/kubernetes.md: its commands exist, its job is one that the server takes, and, at length, all of it is run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from everstep.cli.main import cli
from everstep.platforms.kubernetes.crds import definitions
from everstep.platforms.kubernetes.job import settings_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
FENCED = PAGE.split("```")[1::2]
COMMANDS = [line for block in FENCED if block[:3] in ("sh\n", "\nev") for line in block.splitlines()[1:]]
(JOB,) = (yaml.safe_load(block.removeprefix("yaml\n")) for block in FENCED if block.startswith("yaml\n"))


def test_every_verb_and_flag_exists() -> None:
    used = [line.split("|")[0].split() for line in COMMANDS if line.startswith("everstep ")]
    assert len(used) >= 9
    for _, verb, *words in used:
        known = {flag for option in cli.commands[verb].params for flag in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


def test_its_job_is_one() -> None:
    assert settings_of({**JOB, "metadata": {**JOB["metadata"], "namespace": "default"}})["parity"] == "1+1"


def test_its_job_is_taken_by_the_server() -> None:
    pytest.importorskip("cel")
    from everstep.platforms.kubernetes.demo.api_server import CRDS, ApiServer

    server = ApiServer()
    for definition in definitions():
        server.create(server.of(CRDS), "", definition)
    stored = server.create(server.of("elasticjobs"), "default", JOB)
    assert stored["spec"]["script"] == JOB["spec"]["script"], "no field of it was dropped"


def test_the_kinds_of_an_operator_come_from_one_source() -> None:
    from everstep.platforms.kubernetes.crds import printed
    from everstep.platforms.kubernetes.manifests import manifests, printed_manifests

    kinds = list(yaml.safe_load_all(printed()))
    assert kinds == list(definitions())
    made = list(yaml.safe_load_all(printed_manifests("train", "everstep:1")))
    assert made == list(manifests("train", "everstep:1")) and all(kind in made for kind in kinds)
    assert len(printed()) < 30_000, "small enough to be read"


SCRIPT = """
import time
import numpy as np, torch
import everstep as es

job = es.join()
x = np.arange(4000, dtype=np.float32)
model = job.replicate(torch.nn.Linear(1, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
for batch in job.steps(job.loader({"x": x}, batch_size=20, epochs=1000)):
    opt.zero_grad(); model(batch["x"].reshape(-1, 1)).sum().backward(); opt.step()
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.platforms
@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_its_commands_run(tmp_path: Path) -> None:
    pytest.importorskip("lightkube")
    pytest.importorskip("cel")
    (tmp_path / "train.py").write_text(SCRIPT)
    job = {**JOB, "spec": {**JOB["spec"], "script": str(tmp_path / "train.py")}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    env = {**os.environ, "KUBECONFIG": "demo/kubeconfig"}
    start, *words = [line.split() for line in COMMANDS if line.startswith("everstep ") and "--context" not in line]
    words = [each for each in words if "k8s:flights" in each or each[1] == "submit"]
    argv = [sys.executable, "-m", "everstep.cli"]
    demo = subprocess.Popen([*argv, *start[1:-1]], cwd=tmp_path, env=env)

    def run(*each: str) -> str:
        done = subprocess.run(
            [*argv, *each], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (each, done.stderr)
        return done.stdout

    def until(what: str) -> None:
        end = time.monotonic() + 300
        while what not in (said := run("status", "k8s:flights")):
            assert time.monotonic() < end, said
            time.sleep(0.5)

    try:
        end = time.monotonic() + 120
        while not (tmp_path / "demo" / "kubeconfig").exists():
            assert time.monotonic() < end and demo.poll() is None
            time.sleep(0.2)
        for each in words:
            run(*each[1:])
            if each[1] == "submit":
                until("Running")
            elif each[1] == "scale":
                until("worker: 3 of 3 ready")
            elif each[1] == "suspend":
                until("Suspended")
            elif each[1] == "unsuspend":
                until("  Running")
    finally:
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(120) == 0
