"""Where the snapshots that a placement names lie: this job's own checkpoints, or those it goes on from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.bounds import MALFORMED
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError, ConfigError
from everstep.ids import PartitionId
from everstep.model.snapshot import Manifest, PartitionSnapshot
from everstep.protect.manifest import CHECKPOINTS, ManifestTrust, list_checkpoints, read_manifest
from everstep.storage.atomic import write_atomic
from everstep.storage.places import StoragePlace, open_place

ORIGIN_FILE = "resume.json"


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Is ``RUN_DIR/resume.json``: what a resumed job begins with. ``numbers``: see ``brain.events.JobResumed``."""

    url: str
    numbers: int
    manifest: Manifest


_origin_decoder = msgspec.json.Decoder(Origin)


def write_origin(run_dir: Path, origin: Origin) -> None:
    """Write it, durable on return. Raises PlatformError."""
    write_atomic(run_dir / ORIGIN_FILE, msgspec.json.encode(origin))


def read_origin(run_dir: Path) -> Origin:
    """Raises ConfigError: not there, or damaged."""
    path = run_dir / ORIGIN_FILE
    try:
        return _origin_decoder.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; start again with everstep resume") from None
    except MALFORMED as error:
        raise ConfigError(f"{path} is damaged: {error}; start again with everstep resume") from None


def own_url(spec: JobSpec, run_dir: Path) -> str:
    """Return where this job writes its checkpoints."""
    return spec.checkpoint_to or str(run_dir / CHECKPOINTS)


class SnapshotSources:
    """Finds snapshots by checkpoint number. A job never uses a number of the one that it goes on from again, so a
    number means one checkpoint, wherever it lies. Thread-safe; the manifest asked for last is kept. ``key``: what this
    job's manifests are written with; another one is refused, but for those that the user said to trust."""

    def __init__(
        self, spec: JobSpec, run_dir: Path, key: bytes, places: Callable[[str], StoragePlace] = open_place
    ) -> None:
        self._places = places
        self._trust = ManifestTrust(key=key, digests=spec.trusted)
        self.urls = [url for url in dict.fromkeys((own_url(spec, run_dir), spec.resume_from)) if url]
        self._lock = threading.Lock()
        self._kept: tuple[str, Manifest] | None = None

    def __repr__(self) -> str:
        return f"<SnapshotSources {', '.join(self.urls)}>"

    def snapshot(self, partition: PartitionId, checkpoint: int) -> tuple[StoragePlace, PartitionSnapshot]:
        """Return the place and the snapshot, for ``restore.load_partition``. Raises CheckpointError:
        there is no such checkpoint, it is not intact, or not the job's; StorageError: the place cannot be read, try
        again."""
        with self._lock:
            if self._kept is None or self._kept[1].checkpoint != checkpoint:
                self._kept = self._find(checkpoint)
            url, manifest = self._kept
        for snapshot in manifest.snapshots:
            if snapshot.partition == partition:
                return self._places(url), snapshot
        raise CheckpointError(f"checkpoint {checkpoint} of {url} has no snapshot of partition {partition}")

    def _find(self, checkpoint: int) -> tuple[str, Manifest]:
        for url in self.urls:
            place = self._places(url)
            if checkpoint in list_checkpoints(place):
                return url, read_manifest(place, checkpoint, self._trust)
        raise CheckpointError(f"checkpoint {checkpoint} is not in {' nor in '.join(self.urls)}")
