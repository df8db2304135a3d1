"""Checkpoints of the training state: written while training goes on, read back whole or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from replica_group import Place as RuntimeOf
from replica_runs import Run
from torch import nn

from everstep.allreduce.replica_checkpoint import ReplicaWriter, read_replica, state_dicts
from everstep.brain.events import Answer, Ok, Refused, ReplicaWritten
from everstep.cli.checkpoint import checkpoint as verbs
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError
from everstep.machines.idle_slot import IdleSlot
from everstep.model.group import Position
from everstep.model.snapshot import REPLICA_VERSION, Manifest, ReplicaCopy
from everstep.net.messages import RequestType, TakeReplica
from everstep.net.retry import Deadline
from everstep.protect.manifest import drop_checkpoints, latest_intact, problems, read_manifest, write_manifest
from everstep.storage.places import open_place

WAIT_S = 30.0


class Runtime(RuntimeOf):
    """Keeps what the master is told; the first word of each checkpoint comes too early for it."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, 0, 1, JobSpec(name="toy", mode="allreduce"))
        self.told: list[ReplicaWritten] = []

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        assert isinstance(request, ReplicaWritten)
        self.told.append(request)
        return Refused("not in the journal yet") if len(self.told) % 2 else Ok()


def wait(what: Any) -> None:
    deadline = Deadline(WAIT_S, "a checkpoint")
    while not what():
        deadline.check()


def save(run: Run, where: Path, checkpoint: int) -> Manifest:
    """As the worker and the master do it together."""
    runtime = Runtime(where)
    writer = ReplicaWriter(run.state, runtime)
    writer.order(TakeReplica(checkpoint, str(where)))
    writer.boundary()
    writer.committed_everywhere(run.state.position.step)
    wait(lambda: writer.idle)
    assert writer.saved == run.state.position
    snapshot = runtime.told[-1].replica
    assert isinstance(snapshot, ReplicaCopy) and runtime.told[-1].error == ""
    manifest = Manifest(
        version=REPLICA_VERSION,
        job="toy",
        checkpoint=checkpoint,
        at=1.0,
        seed=0,
        partitions=64,
        snapshots=(),
        replica=snapshot,
    )
    write_manifest(open_place(where), manifest)
    return manifest


def trained(steps: int = 3) -> Run:
    run = Run(0)
    for _ in range(steps):
        run.step()
    return run


def test_a_checkpoint_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    run = trained()
    save(run, tmp_path, 7)
    place = open_place(tmp_path)
    manifest = latest_intact(place)
    other = Run(5)
    other.state.load(read_replica(place, manifest))
    assert other.state.digest() == run.state.digest() and other.state.position == run.state.position


def test_training_goes_on_while_it_is_written_and_it_is_told_when_all_have_its_steps(tmp_path: Path) -> None:
    run = trained()
    digest = run.state.digest()
    runtime = Runtime(tmp_path)
    writer = ReplicaWriter(run.state, runtime)
    writer.order(TakeReplica(1, str(tmp_path)))
    writer.boundary()
    for _ in range(3):
        run.step()
        writer.boundary()
    wait(lambda: list(tmp_path.glob("images/000001/replica-*.rep")))
    writer.order(TakeReplica(1, str(tmp_path)))  # (the master says it again)
    assert not runtime.told  # a step before it may still be undone
    writer.committed_everywhere(2)
    assert not runtime.told
    writer.committed_everywhere(3)
    wait(lambda: writer.saved)
    snapshot = runtime.told[-1].replica
    assert isinstance(snapshot, ReplicaCopy) and snapshot.position == Position(3, 0, 0, 48) and len(runtime.told) == 2
    write_manifest(
        open_place(tmp_path),
        Manifest(job="toy", checkpoint=1, at=1.0, seed=0, partitions=1, snapshots=(), replica=snapshot),
    )
    other = Run(5)
    other.state.load(read_replica(open_place(tmp_path), latest_intact(open_place(tmp_path))))
    assert other.state.digest() == digest
    assert len(list(tmp_path.glob("images/000001/*"))) == 1


class WatchedSlot(IdleSlot):
    """Counts claims that were put off, of all slots."""

    put_off = 0

    def claim(self, wanted: int, least: int = 1) -> int:
        granted = super().claim(wanted, least)
        WatchedSlot.put_off += not granted
        return granted


@pytest.mark.parametrize("hurry", [False, True])
def test_a_checkpoint_that_nobody_waits_for_takes_the_idle_slots_of_steps(
    hurry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained()
    digest, position = run.state.digest(), run.state.position
    monkeypatch.setattr("everstep.allreduce.replica_checkpoint.IdleSlot", WatchedSlot)
    monkeypatch.setattr("everstep.allreduce.replica_checkpoint.SILENT_S", 3600.0)
    monkeypatch.setattr("everstep.allreduce.replica_checkpoint.PACED_S", 3600.0)
    monkeypatch.setattr("everstep.protect.replicafile.WRITE_BYTES", 256)
    runtime, before = Runtime(tmp_path), WatchedSlot.put_off
    writer = ReplicaWriter(run.state, runtime)
    writer.order(TakeReplica(1, str(tmp_path), idle=True))
    writer.boundary()
    writer.committed_everywhere(position.step)
    wait(lambda: WatchedSlot.put_off > before)  # (and for an hour nothing happens without a step)
    assert not writer.idle and not list(tmp_path.glob("images/000001/replica-*.rep"))
    run.step()  # what is written is the copy
    if hurry:
        writer.order(TakeReplica(1, str(tmp_path)))
        wait(lambda: writer.idle)
    else:
        wait(lambda: writer.boundary() or writer.idle)
    snapshot = runtime.told[-1].replica
    assert isinstance(snapshot, ReplicaCopy) and snapshot.position == position
    write_manifest(
        open_place(tmp_path),
        Manifest(job="toy", checkpoint=1, at=1.0, seed=0, partitions=1, snapshots=(), replica=snapshot),
    )
    other = Run(5)
    other.state.load(read_replica(open_place(tmp_path), latest_intact(open_place(tmp_path))))
    assert other.state.digest() == digest


def test_a_place_that_takes_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runtime = Runtime(tmp_path)
    writer = ReplicaWriter(Run().state, runtime)
    writer.order(TakeReplica(1, str(tmp_path / "file" / "x")))
    writer.boundary()
    wait(lambda: len(runtime.told) == 2)
    assert runtime.told[-1].replica is None and "cannot write" in runtime.told[-1].error


@pytest.mark.parametrize("at", ["begin", "middle", "end"])
def test_one_flipped_bit_anywhere_is_found_and_the_older_checkpoint_wins(tmp_path: Path, at: str) -> None:
    run = trained()
    save(run, tmp_path, 1)
    run.step()
    manifest = save(run, tmp_path, 2)
    assert manifest.replica is not None
    path = tmp_path / manifest.replica.file.path
    data = bytearray(path.read_bytes())
    data[{"begin": 9, "middle": len(data) // 2, "end": len(data) - 3}[at]] ^= 4
    path.write_bytes(data)
    place = open_place(tmp_path)
    with pytest.raises(CheckpointError, match=r"was changed: the checksum of|cut or changed"):
        read_replica(place, manifest)
    said: list[str] = []
    assert latest_intact(place, tell=said.append).checkpoint == 1
    assert len(said) == 1 and path.name in said[0]
    result = CliRunner().invoke(verbs, ["verify", str(tmp_path)])
    assert isinstance(result.exception, CheckpointError) and result.exception.exit_code == 2
    assert "checkpoint 1: intact, 1 files" in result.output and "checkpoint 2: NOT intact" in result.output


def test_cut_missing_exchanged_and_newer_files(tmp_path: Path) -> None:
    run = trained()
    manifest = save(run, tmp_path, 1)
    run.step()
    later = save(run, tmp_path, 2)
    assert manifest.replica is not None and later.replica is not None
    place = open_place(tmp_path)
    path, other = tmp_path / manifest.replica.file.path, tmp_path / later.replica.file.path
    whole = path.read_bytes()

    def wrong() -> str:
        (line,) = problems(place, manifest)
        with pytest.raises(CheckpointError) as error:
            read_replica(place, manifest)
        assert "\n" not in str(error.value)
        return line

    path.write_bytes(whole[:-10])
    assert "it was cut" in wrong()
    path.write_bytes(other.read_bytes())
    assert "not the file that the manifest means" in wrong() or "bytes, not the" in wrong()
    path.unlink()
    assert f"{path} is missing: checkpoint 1 is that file" in wrong()
    newer = msgspec.structs.replace(manifest, version=9, checkpoint=3)
    write_manifest(place, newer)
    with pytest.raises(CheckpointError, match="is of version 9, this everstep reads version 3: install a newer one"):
        read_manifest(place, 3)


def test_a_model_of_another_shape_is_one_line(tmp_path: Path) -> None:
    manifest = save(trained(), tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"parameter '0.weight' is float32 \[8, 4\] there, and float32 \[5, 4\]"):
        Run(0, width=5).state.load(read_replica(open_place(tmp_path), manifest))


def test_dropped_checkpoints_take_their_files_along(tmp_path: Path) -> None:
    run = trained()
    save(run, tmp_path, 1)
    run.step()
    save(run, tmp_path, 2)
    assert drop_checkpoints(open_place(tmp_path), [1]) == 1
    assert not list(tmp_path.glob("images/000001/*")) and len(list(tmp_path.glob("images/000002/*"))) == 1
    assert latest_intact(open_place(tmp_path)).checkpoint == 2


def test_what_is_exported_needs_no_everstep(tmp_path: Path) -> None:
    run = trained()
    save(run, tmp_path / "c", 1)
    out = tmp_path / "out"
    result = CliRunner().invoke(verbs, ["export", str(tmp_path / "c"), str(out)], catch_exceptions=False)
    assert result.exit_code == 0 and "model.safetensors: 9 tensors" in result.output
    from safetensors.torch import load_file

    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    plain.load_state_dict(load_file(out / "model.safetensors"))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), run.model.parameters(), strict=True))
    rest = torch.load(out / "training.pt", weights_only=True)
    assert rest["step"] == 3 and rest["optimizers"][0]["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    moments = run.optimizers[0].state[run.model[0].weight]["exp_avg"]
    assert torch.equal(rest["optimizers"][0]["state"]["0.weight"]["exp_avg"], moments)
    assert set(rest["tracked"]) == {"one", "two", "average", "scaler"}


def test_listed_and_shown(tmp_path: Path) -> None:
    save(trained(), tmp_path, 1)
    listed = CliRunner().invoke(verbs, ["ls", str(tmp_path), "--json"], catch_exceptions=False)
    (one,) = json.loads(listed.output)
    assert (one["checkpoint"], one["kind"], one["state"]) == (1, "replica", "whole")
    shown = CliRunner().invoke(verbs, ["show", str(tmp_path)], catch_exceptions=False)
    assert "mode allreduce" in shown.output and "3 steps" in shown.output


def test_state_dicts_are_plain(tmp_path: Path) -> None:
    run = trained()
    found = state_dicts(run.state.snapshot(), "it")
    assert list(found["model"]) == [n for n, _ in (*run.model.named_parameters(), *run.model.named_buffers())]


def test_an_object_store_takes_it_too(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    run = trained()
    runtime = Runtime(tmp_path)
    writer = ReplicaWriter(run.state, runtime)
    writer.order(TakeReplica(1, url))
    writer.boundary()
    writer.committed_everywhere(3)
    wait(lambda: writer.saved)
    snapshot = runtime.told[-1].replica
    place = open_place(url)
    write_manifest(
        place, Manifest(job="toy", checkpoint=1, at=1.0, seed=0, partitions=1, snapshots=(), replica=snapshot)
    )
    other = Run(5)
    other.state.load(read_replica(place, latest_intact(place)))
    assert other.state.digest() == run.state.digest()
