"""Runs ``everstep resume RUN_DIR|URL``: a new run that begins with a checkpoint of an old one.

The old run is only read. The new one has a run directory, a journal and audit logs of its own; what it begins with is
in its ``resume.json``, and the first event of its journal but one is that checkpoint's position.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from everstep.agent.rundir import RunDirLock, in_use
from everstep.cli.display import read_summary
from everstep.cli.run import absolute, absolute_endpoint, model_place, refuse_used, run_here
from everstep.config.load import check_script, load_spec, new_run_dir, read_origins, read_spec
from everstep.config.renamed import SETTINGS as OLD_SETTINGS
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError, ConfigError
from everstep.ids import Incarnation
from everstep.model.snapshot import Manifest
from everstep.net.auth import load_secret
from everstep.net.rendezvous import SECRET_FILE
from everstep.protect.manifest import (
    ManifestTrust,
    checkpoint_place,
    digest_of,
    latest_intact,
    list_checkpoints,
    problems,
    read_bytes,
    read_manifest,
)
from everstep.protect.restore import unloadable
from everstep.protect.sources import Origin, own_url, write_origin
from everstep.storage.journal import Journal
from everstep.storage.places import StoragePlace, open_place

KEPT = ("partitions", "seed")  # a row's partition and first value, and the order of the data, depend on them


def resume_job(
    source: str, checkpoint: int | None, flags: Mapping[str, Any], live: bool, secret: str = "", trusted: bool = False
) -> int:
    """Run on until the job's end; the exit code of ``everstep``. ``secret``: a copy of the secret file of the run that
    wrote the checkpoints; ``trusted``: the user trusts whoever wrote them. Raises ConfigError, CheckpointError,
    StorageError."""
    old_dir = Path(absolute(source)) if is_run_dir(source) else None
    if old_dir is not None and in_use(old_dir):
        raise ConfigError(f"run directory {source}: this job is running; end it first (everstep stop {source})")
    place = checkpoint_place(old_dir if old_dir is not None else absolute(source))
    key = lineage(old_dir, secret)
    trust = ManifestTrust(key=key, anything=trusted or (old_dir is not None and read_spec(old_dir).trust_checkpoint))
    below = 0
    while True:
        manifest = choose(place, checkpoint, trust, below)
        code, run_dir = _resume(place, manifest, trust, old_dir, flags, live)
        ended = read_summary(run_dir)
        if checkpoint is not None or ended is None or ended.set_aside != manifest.checkpoint:
            return code
        if ended.samples_done > manifest.samples_done:
            return code  # it was loaded once, and trained on: no older one has that
        below = manifest.checkpoint
        sys.stderr.write(f"everstep: checkpoint {below} is set aside; going on from the next older one\n")
        if flags.get("run_dir"):
            flags = {**flags, "run_dir": _beside(run_dir)}


def _beside(run_dir: Path) -> str:
    """Return a run directory that is not there yet, for the next attempt."""
    stem = re.sub(r"-\d+\Z", "", str(run_dir))
    return next(name for number in range(2, 1000) if not Path(name := f"{stem}-{number}").exists())


def _resume(
    place: StoragePlace,
    manifest: Manifest,
    trust: ManifestTrust,
    old_dir: Path | None,
    flags: Mapping[str, Any],
    live: bool,
) -> tuple[int, Path]:
    """Run on from this one; the exit code, and the run directory."""
    by_word = not trust.authentic(read_bytes(place, manifest.checkpoint))
    if by_word:
        sys.stderr.write(
            f"everstep: checkpoint {manifest.checkpoint} of {place.url} was not written with this job's key: loaded "
            "because of --trust-checkpoint, with the script and the settings that it names\n"
        )
    digests = (digest_of(read_bytes(place, manifest.checkpoint)),) if by_word else ()
    given = {**flags, "trust_checkpoint": trust.anything, "trusted": digests}
    spec, origins = resumed_spec(manifest, place, old_dir, given)
    run_dir = new_dir(spec, old_dir)
    spec = msgspec.structs.replace(spec, run_dir=str(run_dir))
    with RunDirLock.take(run_dir):
        refuse_used(run_dir)
        prepare(run_dir, spec, place, manifest)
        age_s = time.time() - manifest.at
        sys.stdout.write(
            f"everstep: resume from checkpoint {manifest.checkpoint} of {place.url}, {age_s:,.0f} s old: "
            f"{manifest.samples_done:,} samples are done\n"
        )
        return run_here(spec, origins, run_dir, live, trust.key), run_dir


def is_run_dir(source: str) -> bool:
    return "://" not in source and (Path(source) / "job.json").exists()


def lineage(old_dir: Path | None, secret: str) -> bytes:
    """Return the key of the checkpoints: out of the old run directory, or of the file that was named; empty: not known.
    Raises ConfigError: the file is damaged, or open to others."""
    if secret:
        return load_secret(Path(absolute(secret))).checkpoint_key
    if old_dir is None or not (old_dir / SECRET_FILE).exists():
        return b""
    return load_secret(old_dir / SECRET_FILE).checkpoint_key


def choose(place: StoragePlace, checkpoint: int | None, trust: ManifestTrust, below: int = 0) -> Manifest:
    """Return the newest checkpoint that is whole and may be loaded (``below``: an older one), or the one asked for if
    it is. Of one that was not written with the job's key every part is tried, too. Raises CheckpointError,
    UntrustedError, StorageError."""

    def also(manifest: Manifest) -> Iterator[str]:
        if not trust.authentic(read_bytes(place, manifest.checkpoint)):
            yield from unloadable(place, manifest)

    if checkpoint is None:
        return latest_intact(
            place, tell=lambda line: print(f"everstep: {line}", file=sys.stderr), trust=trust, also=also, below=below
        )
    manifest = read_manifest(place, checkpoint, trust)
    for problem in chain(problems(place, manifest), also(manifest)):
        raise CheckpointError(
            f"checkpoint {checkpoint}: {problem}; everstep checkpoint ls {place.url} shows the others"
        )
    return manifest


def resumed_spec(
    manifest: Manifest, place: StoragePlace, old_dir: Path | None, flags: Mapping[str, Any]
) -> tuple[JobSpec, dict[str, str]]:
    """Return the old job's spec with what was given now. Raises ConfigError."""
    old = manifest.spec or (read_spec(old_dir) if old_dir is not None else None)
    if old is None:
        raise ConfigError(f"{place.url}: its manifests do not say of which job; name the run directory instead")
    kept = {name: getattr(old, name) for name in JobSpec.__struct_fields__ if name != "run_dir"}
    # (in the old run directory: the new run has its own)
    given = {name: value for name, value in flags.items() if value is not None}
    for old_name, name in OLD_SETTINGS.items():
        if old_name in given:
            del kept[name]  # what is given by its old name counts, too
    values = {**kept, "resume_from": place.url, **given}
    values["model_to"] = model_place(given.get("model_to") or ("none" if old.model_to == "none" else ""))
    if given.get("checkpoint_to"):
        values["checkpoint_to"] = absolute(given["checkpoint_to"])
    script = check_script(values["script"])
    spec, origins = load_spec(None, values, {})
    if spec.grouped != (manifest.replica is not None):
        of = "allreduce or pipeline" if manifest.replica is not None else "ps"
        raise ConfigError(f"--mode {spec.mode}: checkpoint {manifest.checkpoint} of {place.url} is of mode {of}")
    spec = msgspec.structs.replace(spec, script=str(script), bind=absolute_endpoint(spec.bind), files_port=0)
    before = read_origins(old_dir) if old_dir is not None else {}
    from_checkpoint = f"checkpoint {manifest.checkpoint}"
    origins = {name: origin if name in given else before.get(name, from_checkpoint) for name, origin in origins.items()}
    return spec, origins


def new_dir(spec: JobSpec, old_dir: Path | None) -> Path:
    """Return the run directory: given, or ``OLD-resumed``, ``OLD-resumed-2`` and so on beside the old one."""
    if spec.run_dir:
        return Path(absolute(spec.run_dir))
    if old_dir is None:
        return new_run_dir(spec.name)
    stem = old_dir.name.partition("-resumed")[0]
    for number in range(1, 1000):
        name = f"{stem}-resumed" if number == 1 else f"{stem}-resumed-{number}"
        if not (old_dir.parent / name).exists():
            return old_dir.parent / name
    raise ConfigError(f"{old_dir.parent} has 999 resumed runs of {stem}; name a --run-dir")


def prepare(run_dir: Path, spec: JobSpec, place: StoragePlace, manifest: Manifest) -> None:
    """Prepare what the first master finds. Leases must be later than every fence in the snapshots, so the masters'
    incarnations go on from the old job's; checkpoint numbers go on too, also past those that are not intact."""
    own = open_place(own_url(spec, run_dir))
    numbers = max([manifest.checkpoint, *list_checkpoints(place), *list_checkpoints(own)])
    for stale in run_dir.glob("journal.sqlite*"):  # of an attempt that did not get as far as a job.json
        stale.unlink()
    write_origin(run_dir, Origin(url=place.url, numbers=numbers, manifest=manifest))
    Journal(run_dir / "journal.sqlite", Incarnation(max(1, manifest.master_incarnation))).close()
