"""Checkpoints of the training state that a worker of another node writes and reads: all files are on the first node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_runs import Run
from test_checkpoint import Runtime, wait

from everstep.allreduce.replica_checkpoint import ReplicaWriter, find_replica, read_replica
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError
from everstep.ids import NodeId
from everstep.model.member import Address
from everstep.model.snapshot import REPLICA_VERSION, Manifest, ReplicaCopy
from everstep.net.auth import Identity, Secret, create_secret, load_secret
from everstep.net.messages import TakeReplica
from everstep.net.sockets import listen_tcp
from everstep.protect.home_files import HomeFiles, HomeLink, served_places
from everstep.protect.manifest import write_manifest
from everstep.protect.model import ABOUT_FILE, IN_RUN_DIR
from everstep.storage.places import open_place

FAR = Identity(purpose="data", role="worker", node=NodeId("b"), pid=1)
SPEC = JobSpec(name="toy", mode="allreduce", bind="127.0.0.1:0", model_to=IN_RUN_DIR)


class FarRuntime(Runtime):
    """Is of a node with a run directory of its own, in which no checkpoint is."""

    def __init__(self, run_dir: Path, link: HomeLink) -> None:
        super().__init__(run_dir)
        self.spec, self.link = SPEC, link

    def home_link(self) -> HomeLink:
        return self.link


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    create_secret(tmp_path / "secret")
    return load_secret(tmp_path / "secret")


@pytest.fixture
def link(tmp_path: Path, secret: Secret) -> Iterator[HomeLink]:
    listener = listen_tcp("127.0.0.1", 0)
    files = HomeFiles(served_places(SPEC, tmp_path / "home"), tmp_path / "audit", listener)
    files.serve(secret, True)
    made = HomeLink(Address(NodeId("node0"), "", "127.0.0.1", listener.getsockname()[1]), secret, FAR, True)
    yield made
    made.close()
    files.close()


def written(home: Path, far: Path, link: HomeLink, run: Run, model: str = "") -> ReplicaCopy:
    """Have a worker of the other node write checkpoint 1, as the master orders it: by the first node's paths."""
    runtime = FarRuntime(far, link)
    writer = ReplicaWriter(run.state, runtime)
    writer.order(TakeReplica(1, str(home / "checkpoints"), model=model))
    writer.boundary()
    writer.committed_everywhere(run.state.position.step)
    wait(lambda: writer.idle)
    assert runtime.told[-1].error == ""
    found = runtime.told[-1].replica
    assert isinstance(found, ReplicaCopy)
    return found


def test_a_worker_of_another_node_writes_to_the_first_one_and_begins_from_there(
    tmp_path: Path, secret: Secret, link: HomeLink
) -> None:
    home, far = tmp_path / "home", tmp_path / "far"
    run = Run(0)
    for _ in range(3):
        run.step()
    replica = written(home, far, link, run)
    assert (home / "checkpoints" / replica.file.path).is_file() and not far.exists()
    manifest = Manifest(
        version=REPLICA_VERSION, job="toy", checkpoint=1, at=1.0, seed=0, partitions=1, snapshots=(), replica=replica
    )
    write_manifest(open_place(home / "checkpoints"), manifest, secret.checkpoint_key)
    place, known = find_replica(SPEC, far, 1, secret.checkpoint_key, link)
    other = Run(5)
    other.state.load(read_replica(place, known))
    assert other.state.digest() == run.state.digest()
    with pytest.raises(CheckpointError, match="checkpoint 1 is not in"):
        find_replica(SPEC, far, 1, secret.checkpoint_key)  # (as if the files were here)


def test_the_model_that_it_leaves_is_on_the_first_node(tmp_path: Path, secret: Secret, link: HomeLink) -> None:
    home, far = tmp_path / "home", tmp_path / "far"
    # A path that the other machine could not make if it took it for its own.
    (tmp_path / "file").write_text("")
    written(home, far, link, Run(0), str(tmp_path / "file" / "model"))
    assert sorted(path.name for path in (home / "model").iterdir()) == ["model.safetensors", "training.pt"]
    assert not (home / "model" / ABOUT_FILE).exists()  # the first node writes it, last
