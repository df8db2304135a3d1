"""Leaves the model of a job that ends in order: files that plain PyTorch reads.

Mode ps: ``dense.safetensors`` (the model's ``state_dict`` without its tables) and ``tables/NAME.safetensors``
(``keys``, ``values``, ``state``: the optimizer's), of the dense part too. Mode allreduce: ``model.safetensors`` (the
model's ``state_dict``) and ``training.pt`` (``torch.load(path, weights_only=True)``: optimizers and what is tracked);
tables on ps as in mode ps. ``model.json`` is written last: without it the others are not whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.config.spec import JobSpec
from everstep.errors import PlatformError
from everstep.model.snapshot import Manifest
from everstep.protect.export import file_name, write_dense, write_safetensors
from everstep.storage.places import StoragePlace, open_place

IN_RUN_DIR = "run_dir"
MODEL_LIMIT_BYTES = int(os.environ.get("EVERSTEP_MODEL_LIMIT", "") or 4 << 30)
"""A larger model is left only where the job names a place."""

ABOUT_FILE = "model.json"


class About(msgspec.Struct, kw_only=True):
    """Is ``model.json``."""

    job: str
    checkpoint: int  # of the job, that has the same; 0: none
    samples: int
    step: int = 0  # mode allreduce
    files: dict[str, int]  # name: bytes


def model_url(spec: JobSpec, run_dir: Path) -> str:
    """Return where this job leaves its model; "": nowhere."""
    if spec.model_to in ("", "none"):
        return ""
    return str(run_dir / "model") if spec.model_to == IN_RUN_DIR else spec.model_to


def too_large(size_bytes: int) -> str:
    size, most = size_bytes / 2**30, MODEL_LIMIT_BYTES / 2**30
    return (
        f"the model has {size:.1f} GiB, and more than {most:.1f} GiB are not left in the run "
        "directory unasked: name a place (--model-to DIR_OR_URL), or say --model-to none"
    )


@contextlib.contextmanager
def model_folder(url: str, there: StoragePlace | None = None) -> Iterator[Path]:
    """Yield a folder to write the model's files into; they are at ``url`` when this returns. ``there``: what reaches
    that directory, if it is another machine's. Raises PlatformError, StorageError, ConfigError."""
    try:
        if "://" not in url and there is None:
            folder = Path(url)
            folder.mkdir(parents=True, exist_ok=True)
            yield folder
            return
        place = there or open_place(url)
        temporary = Path(tempfile.mkdtemp(prefix="everstep-model-"))
        try:
            yield temporary
            for path in sorted(temporary.rglob("*")):
                if path.is_file():
                    with path.open("rb") as source, place.create(str(path.relative_to(temporary))) as file:
                        while piece := source.read(8 << 20):
                            file.write(piece)
                        file.commit()
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise PlatformError(f"cannot write the model to {url}: {error.strerror or error}") from error


def write_tables(place: StoragePlace, manifest: Manifest, folder: Path) -> None:
    """Write the tables of a checkpoint, and the dense part if that is among them. Raises CheckpointError, StorageError,
    PlatformError."""
    for spec in manifest.tables:
        write_safetensors(place, manifest, spec, folder / "tables" / f"{file_name(spec.name)}.safetensors")
    if any(spec.dense for spec in manifest.tables):
        write_dense(place, manifest, folder / "dense.safetensors")


def write_about(folder: Path, url: str, job: str, checkpoint: int, samples: int, step: int = 0) -> About:
    """Says what there is at ``url``, of which ``folder`` has some; the last file. Raises OSError, StorageError."""
    files = open_place(url).sizes() if "://" in url else {}
    files |= {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ABOUT_FILE and not path.name.startswith(".")
    }
    about = About(job=job, checkpoint=checkpoint, samples=samples, step=step, files=files)
    (folder / ABOUT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    return about


def loads_with(url: str, files: dict[str, int]) -> str:
    """Return the one line of plain PyTorch that loads it; "": there is no dense part."""
    for name, strict in (("model.safetensors", ""), ("dense.safetensors", ", strict=False")):
        if name in files:
            return f'model.load_state_dict(safetensors.torch.load_file("{url}/{name}"){strict})'
    return ""
