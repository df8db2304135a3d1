"""Images with another version of everstep, on a played cluster: the real handshake refuses, a condition tells it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_jobs import KubeRun, until

from everstep import __version__

pytest.importorskip("lightkube")
pytest.importorskip("cel")
pytestmark = [pytest.mark.processes, pytest.mark.platforms, pytest.mark.slow, pytest.mark.timeout(600)]

OTHER = "9.9.9"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[KubeRun]:
    made = KubeRun(tmp_path)
    yield made
    made.close()


def other_image(folder: Path) -> dict[str, str]:
    """Return the environment in which everstep is of another version."""
    shim = folder / "image"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(f"import everstep\neverstep.__version__ = {OTHER!r}\n")
    return {"PYTHONPATH": str(shim)}


def conditions(run: KubeRun) -> dict[str, str]:
    """Return the conditions that hold, with their messages."""
    found = (run.job.get("status") or {}).get("conditions") or []
    return {c["type"]: c["message"] for c in found if c["status"] == "True"}


def test_agents_of_another_version_than_their_master(run: KubeRun) -> None:
    """The image of the ps differs from that of master and workers."""
    run.images["ps"] = other_image(run.folder)
    run.write(4)
    run.start_operator()
    run.submit(mode="ParameterServer", worker={"replicas": 1, "minReplicas": 1}, ps={"replicas": 1, "restartLimit": 2})
    until(lambda: "PodsFail" in conditions(run), run.story)
    words = conditions(run)["PodsFail"]
    assert f"the master is everstep {__version__} " in words and f"this is everstep {OTHER} " in words, words
    assert "install the same version everywhere" in words and "\n" not in words, words
    assert words in run.everstep("status", "k8s:story")
    until(lambda: run.phase == "Failed", run.story)
    assert OTHER in conditions(run)["Failed"] and "restartLimit is 2" in conditions(run)["Failed"], run.story()
    until(lambda: not run.pods(), run.story)
    run.nothing_left()


def test_a_whole_image_of_another_version_than_the_operators(run: KubeRun) -> None:
    """Its processes understand each other, so the job trains to its end. The operator cannot talk to its master."""
    run.images["worker"] = run.images["ps"] = other_image(run.folder)
    run.write(1)
    run.start_operator()
    run.submit(mode="ParameterServer", worker={"replicas": 1, "minReplicas": 1}, ps={"replicas": 1})
    until(lambda: "OtherVersion" in conditions(run), run.story)
    words = conditions(run)["OtherVersion"]
    assert f"has everstep {OTHER} " in words and f"the operator is everstep {__version__} " in words, words
    assert "use the same version for both" in words and "\n" not in words, words
    assert words in run.everstep("status", "k8s:story")
    run.ended_well()
    assert (run.folder / "operator.log").read_text().count(f"the master is everstep {OTHER}") == 1, run.story()
    run.nothing_left()
