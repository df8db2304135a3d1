"""Checkpoints and resume with real processes: kill everything, go on elsewhere, and every sample counts once.

The script counts: row r of its table gains exactly 1.0 for each time that sample r is trained, in any order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from local_jobs import Run, until

sys.path.insert(0, str(Path(__file__).parent.parent / "protect"))

from crafted_snapshots import craft, of_bodies

from everstep.model.member import Role
from everstep.net.auth import load_secret
from everstep.protect.export import find_table, table_rows
from everstep.protect.manifest import (
    ManifestTrust,
    checkpoint_place,
    latest_intact,
    list_checkpoints,
    manifest_name,
    read_bytes,
    read_manifest,
    write_manifest,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SAMPLES, EPOCHS = 1200, 3
SCRIPT = """
import os, time
import numpy as np
import everstep as es
from torch import nn

job = es.join()
data = {{"ids": np.arange({samples}).reshape(-1, 1)}}

class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = es.nn.Embedding("count", {dim}, optimizer=es.SGD(lr=1.0), init=es.Constant(0.0))
    def forward(self, batch):
        return self.rows(batch["ids"])

model = job.sparse(Count())
for batch in job.steps(job.loader(data, batch_size=20, epochs={epochs})):
    (-model(batch).sum()).backward()
    if not os.path.exists({hurry!r}):
        time.sleep({pause_s})
"""


class Counting(Run):
    def write(self, rows: int = SAMPLES, epochs: int = EPOCHS, pause_s: float = 0.12, dim: int = 2) -> None:
        facts = {"samples": rows, "epochs": epochs, "pause_s": pause_s, "dim": dim, "hurry": str(self._hurry)}
        self.script.write_text(SCRIPT.format(**facts))

    def resume(self, source: Path | str, *flags: str) -> Counting:
        """``everstep resume`` as a subprocess, into ``folder/resumed``; this object follows that run from here on."""
        self.run_dir = self.folder / "resumed"
        argv = [sys.executable, "-m", "everstep.cli", "resume", str(source), "--run-dir", str(self.run_dir), *flags]
        self.out = self.folder / "resumed.txt"
        with self.out.open("wb") as out:
            self.popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder)
        return self

    def kill_everything(self) -> None:
        """Agent, master, ps and workers, as when the machine goes."""
        assert self.popen is not None
        for pid in [self.popen.pid, *self.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.leftovers() == {}
        self.popen.wait()

    def newest(self) -> int:
        status = self.status()
        return status.checkpoint.newest if status is not None and status.checkpoint is not None else -1

    def committed(self) -> None:
        """Wait for a checkpoint that begins after now."""
        number: list[int] = []

        def look() -> bool:
            newest = self.newest()
            if newest >= 0 and not number:
                number.append(newest + 2)
            return bool(number) and newest >= number[0]

        until(look, why=self.story)

    def counts(self) -> np.ndarray:
        """What the newest checkpoint has of the table, by sample."""
        place = checkpoint_place(self.run_dir)
        manifest = latest_intact(place)
        counted = np.full((SAMPLES, 2), -1.0, np.float32)
        for rows in table_rows(place, manifest, find_table(manifest, "count")):
            counted[rows.keys] = rows.values
        return counted


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    made = Counting(tmp_path)
    yield made  # type: ignore[misc]
    made.close()


def test_stop_takes_a_last_checkpoint(counting: Counting) -> None:
    run = counting.start("--workers", "1", "--ps", "1", "--checkpoint-every", "1h")
    run.trained(200)
    code, out = run.everstep("stop", str(run.run_dir))
    assert code == 0 and "after a last checkpoint" in out, out
    assert run.wait() == 0, run.story()
    manifest = latest_intact(checkpoint_place(run.run_dir))
    assert manifest.samples_done >= 200
    assert "checkpoint 1 (stop)" in run.text(), run.story()
    # Nobody trained while the snapshots were made: they are of one moment, and a resumed job does nothing twice.
    assert len({tuple(sorted(snapshot.watermarks)) for snapshot in manifest.snapshots}) == 1, run.story()


def test_kill_everything_and_go_on_with_other_numbers(counting: Counting) -> None:
    run = counting.start("--workers", "2", "--ps", "2", "--checkpoint-every", "1s")
    run.trained(300)
    run.committed()
    os.kill(run.master_pid(), signal.SIGKILL)  # the next one goes on with whatever was being written
    run.trained(900)
    code, out = run.everstep("checkpoint", "take", str(run.run_dir))
    assert code == 0 and "checkpoint " in out, out
    run.trained(1100)
    old = run.run_dir
    code, out = run.everstep("resume", str(old))
    assert code == 2 and "is running" in out
    run.kill_everything()
    before = latest_intact(checkpoint_place(old))
    assert 0 < before.samples_done < SAMPLES * EPOCHS

    run.hurry()
    run.resume(old, "--ps", "3", "--workers", "1")
    assert run.wait() == 0, run.story()
    assert f"resume from checkpoint {before.checkpoint}" in run.text()
    assert f"done: {SAMPLES * EPOCHS:,} samples" in run.text()
    assert (run.counts() == EPOCHS).all(), np.unique(run.counts(), return_counts=True)
    run.check_audit()
    code, out = run.everstep("replay", str(run.run_dir))
    assert code == 0, out
    assert run.leftovers() == {}
    code, out = run.everstep("checkpoint", "verify", str(run.run_dir))
    assert code == 0, out


@pytest.mark.parametrize("step", ["before_manifest", "after_manifest"])
def test_the_master_dies_at_a_manifest(counting: Counting, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_FAULT", f"master:0.1:{step}:1")
    run = counting
    run.write(epochs=EPOCHS, pause_s=0.02)
    run.start("--workers", "1", "--checkpoint-every", "1s", "--checkpoint-keep", "999")
    assert run.wait() == 0, run.story()
    assert "1 master" in run.text(), run.text()
    place = checkpoint_place(run.run_dir)
    assert list_checkpoints(place)[0] == 1, "the next master wrote the one that the first had ordered"
    assert (run.counts() == EPOCHS).all()
    run.check_audit()
    for verb in (("checkpoint", "verify"), ("replay",)):
        code, out = run.everstep(*verb, str(run.run_dir))
        assert code == 0, out


def test_a_place_that_takes_nothing(counting: Counting) -> None:
    """Training goes on, and says so."""
    run = counting
    run.write(epochs=1, pause_s=0.02)
    (run.folder / "file").touch()
    run.start("--checkpoint-every", "1s", "--checkpoint-to", "file/checkpoints")
    assert run.wait() == 0, run.story()
    text = run.text()
    assert f"done: {SAMPLES:,} samples" in text and "checkpoint not written: cannot write" in text, text
    assert "given up" in text and "the newest stays none yet" in text, text
    run.check_audit()


def test_a_lost_ps_without_parity_goes_back_to_its_snapshots(counting: Counting) -> None:
    """Twice; only what its partitions lack is trained again, and every sample counts once."""
    counting.write(pause_s=0.3)
    run = counting.start("--workers", "2", "--ps", "2", "--checkpoint-every", "1s")
    for life in (1, 2):
        run.trained(life * 300)
        run.committed()
        run.trained(life * 300 + 150)
        os.kill(run.alive(Role.PS, 1, at_least=life).pid, signal.SIGKILL)
    run.hurry()
    assert run.wait() == 0, run.story()
    assert "go back to checkpoint" in run.text() and "2 ps" in run.text(), run.text()
    assert (run.counts() == EPOCHS).all(), np.unique(run.counts(), return_counts=True)
    run.check_audit()
    assert run.leftovers() == {}


def test_what_cannot_be_gone_on_from(counting: Counting, tmp_path: Path) -> None:
    run = counting
    run.start("--workers", "1", "--checkpoint-every", "1s")
    run.trained(200)
    run.committed()
    run.kill_everything()
    old = run.run_dir

    for source, words in {
        str(tmp_path): "holds no checkpoint",
        str(tmp_path / "nowhere"): "holds no checkpoint",
    }.items():
        code, out = run.everstep("resume", source)
        assert code == 2 and words in out and len(out.strip().splitlines()) == 1, out
    code, out = run.everstep("resume", str(old), "--ps", "0")
    assert code == 2 and "ps = 0 (--ps)" in out, out
    code, out = run.everstep("resume", str(old), "--checkpoint", "999")
    assert code == 2 and "no checkpoint 999" in out, out
    code, out = run.everstep("run", "--checkpoint-to", str(old / "checkpoints"), str(run.script))
    assert code == 2 and "of another job" in out, out

    # The place alone does not say who wrote it; the run directory has the key, and what has no code is not loaded.
    place = checkpoint_place(old)
    code, out = run.everstep("resume", str(old / "checkpoints"))
    assert code == 2 and "was not written with this job's key" in out and "--trust-checkpoint" in out, out
    newest = latest_intact(place)
    write_manifest(place, msgspec.structs.replace(newest, checkpoint=900))
    code, out = run.everstep("resume", str(old), "--checkpoint", "900")
    assert code == 2 and "manifest-000900.json has no code" in out and "--trust-checkpoint" in out, out
    place.delete(manifest_name(900))

    run.write(rows=SAMPLES + 1)
    run.resume(old, "--ps", "1")
    assert run.wait() != 0
    assert f"samples is {SAMPLES + 1} in worker:0, but {SAMPLES} in the checkpoint that it goes on from" in run.text()


@pytest.mark.slow
def test_checkpoints_of_before_there_was_a_key(counting: Counting) -> None:
    """They are loaded if the user says so, and the run says it, too. What it writes then has its key."""
    run = counting.start("--workers", "1", "--ps", "2", "--checkpoint-every", "1s")
    run.trained(300)
    run.committed()
    run.kill_everything()
    old, place = run.run_dir, checkpoint_place(run.run_dir)
    for number in list_checkpoints(place):
        write_manifest(place, read_manifest(place, number))
    code, out = run.everstep("resume", str(old))
    assert code == 2 and "has no code" in out and "--trust-checkpoint" in out, out
    run.hurry()
    run.resume(old, "--ps", "1", "--trust-checkpoint")
    assert run.wait() == 0, run.story()
    text = run.text()
    assert "loaded because of --trust-checkpoint" in text and "which has no code of this job" in text, text
    assert (run.counts() == EPOCHS).all(), np.unique(run.counts(), return_counts=True)
    run.check_audit()
    key = load_secret(run.run_dir / "secret").checkpoint_key
    mine = checkpoint_place(run.run_dir)
    assert all(ManifestTrust(key=key).authentic(read_bytes(mine, number)) for number in list_checkpoints(mine))


@pytest.mark.slow
def test_a_checkpoint_that_no_ps_can_load(counting: Counting) -> None:
    """It has the job's code, and two ps cannot load it: it is set aside by name, and the next older one is taken."""
    run = counting.start("--workers", "1", "--ps", "2", "--checkpoint-every", "1s")
    run.trained(300)
    run.committed()
    run.kill_everything()
    old, place = run.run_dir, checkpoint_place(run.run_dir)
    *_, older, newest = list_checkpoints(place)
    key = load_secret(old / "secret").checkpoint_key
    craft(place.url, read_manifest(place, newest), 1, of_bodies)
    write_manifest(place, read_manifest(place, newest), key)
    code, out = run.everstep("checkpoint", "verify", str(old))
    assert code == 2 and f"checkpoint {newest}: NOT intact" in out and "a blob of kind 3" in out, out

    code, out = run.everstep("resume", str(old), "--run-dir", str(run.folder / "named"), "--checkpoint", str(newest))
    assert code == 4 and f"checkpoint {newest} is set aside, it could not be loaded 2 times: ps:" in out, out
    code, out = run.everstep("explain", str(run.folder / "named"))
    assert code == 0 and "set a checkpoint aside" in out, out

    run.hurry()
    run.resume(old)
    assert run.wait() == 0, run.story()
    text = run.text()
    assert f"checkpoint {newest} is set aside; going on from the next older one" in text, text
    assert f"resume from checkpoint {older}" in text, text
    run.run_dir = Path(f"{run.run_dir}-2")
    assert (run.counts() == EPOCHS).all(), np.unique(run.counts(), return_counts=True)
    run.check_audit()
    assert run.leftovers() == {}


def test_a_table_that_is_another_one_now(counting: Counting) -> None:
    run = counting
    run.start("--workers", "1", "--checkpoint-every", "1s")
    run.trained(100)
    run.committed()
    run.kill_everything()
    old = run.run_dir
    run.write(dim=3)
    run.resume(old)
    assert run.wait() != 0
    # Who sees it first: the ps that has the old one by now, or one that is still to load it.
    first = "table 'count' exists as another one: dim is 2 in the job, 3 in this script"
    assert first in run.text() or "table 'count' dim is 2 in the checkpoint, 3 here" in run.text(), run.text()
