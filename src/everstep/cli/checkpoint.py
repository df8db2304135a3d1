"""``everstep checkpoint``: take one of a running job; look at checkpoints, check them, take tables out of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from everstep.agent.rundir import in_use
from everstep.config.renamed import renamed_line
from everstep.errors import CheckpointError, ConfigError
from everstep.model.snapshot import CheckpointFile, Manifest
from everstep.net.auth import load_secret
from everstep.net.rendezvous import SECRET_FILE
from everstep.protect.manifest import (
    ManifestTrust,
    checkpoint_place,
    compact,
    is_coded,
    latest_intact,
    manifest_name,
    need_checkpoints,
    problems,
    read_bytes,
    read_manifest,
)
from everstep.protect.restore import unloadable
from everstep.storage.places import StoragePlace
from everstep.units import human_bytes

WHERE = click.argument("where", metavar="DIR_OR_URL")
NUMBER = click.option("--checkpoint", "number", type=int, help="Its number (default: the newest).")
_NOT_OURS = "not written with the key of this run"
_NO_KEY = "who wrote it is not known here (name the run directory)"
JSON = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group()
def checkpoint() -> None:
    """Take a checkpoint of a running job; list, show, verify, compact or export those in a run directory, in a
    directory or at a URL."""


def with_verb(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a verb in front: ``checkpoint RUN_DIR`` was what ``checkpoint take RUN_DIR`` is now."""
    old_form = [one for one in arguments if one not in ("--base", "--no-wait")][:1]
    if not old_form or old_form[0] in checkpoint.commands or not Path(old_form[0]).exists():
        return list(arguments)
    _renamed("everstep checkpoint RUN_DIR", "everstep checkpoint take RUN_DIR")
    return ["take", *arguments]


def _renamed(old: str, new: str) -> None:
    click.echo(f"everstep: {renamed_line(old, new)}", err=True)


@checkpoint.command("take")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Everything, not only what changed since the last one.")
@click.option("--no-wait", is_flag=True, help="Return as soon as it has begun.")
@click.option("--base", is_flag=True, hidden=True)
def take(run_dir: Path, full: bool, no_wait: bool, base: bool) -> None:
    """Take a checkpoint of a running job now; training goes on meanwhile."""
    from everstep.cli.take_checkpoint import take_checkpoint

    if base:
        _renamed("--base", "--full")
    take_checkpoint(run_dir, full or base, not no_wait)


@checkpoint.command("ls")
@WHERE
@JSON
def ls(where: str, as_json: bool) -> None:
    """List all checkpoints there, and say whether their files are."""
    place = checkpoint_place(where)
    sizes = place.sizes()
    lines = [_line(place, number, sizes) for number in need_checkpoints(place)]
    if as_json:
        click.echo(msgspec.json.encode(lines).decode())
        return
    titles = {
        "checkpoint": "checkpoint",
        "taken": "taken",
        "kind": "kind",
        "rows": "rows",
        "size": "size",
        "written": "written",
        "samples": "samples",
        "state": "state",
    }
    table = [titles, *({**one, **_human(one)} for one in lines)]
    for row in _columns([[str(row.get(name, "")) for name in titles] for row in table]):
        click.echo(row)


@checkpoint.command("show")
@WHERE
@NUMBER
@JSON
def show(where: str, number: int | None, as_json: bool) -> None:
    """Show what one checkpoint holds."""
    place = checkpoint_place(where)
    manifest = _choose(place, number, deep=False)
    if as_json:
        click.echo(msgspec.json.encode(manifest).decode())
        return
    for line in describe(place, manifest):
        click.echo(line)


@checkpoint.command("verify")
@WHERE
@NUMBER
def verify(where: str, number: int | None) -> None:
    """Read every byte of all checkpoints (or of one), compare the checksums, and take each part as a ps or a worker
    would that loads it; exit code 2 names each offender."""
    place = checkpoint_place(where)
    trust = ManifestTrust(key=_key_of(where))
    sizes = place.sizes()
    known: dict[CheckpointFile, str] = {}
    shown: set[str] = set()
    bad = 0
    numbers = need_checkpoints(place) if number is None else [number]
    for one in numbers:
        try:
            manifest = read_manifest(place, one)
            wrong = list(problems(place, manifest, sizes=sizes, known=known)) or _unreadable(place, manifest)
        except CheckpointError as error:
            wrong = [str(error)]
        else:
            if not wrong:
                files = set(manifest.files())
                size = sum(file.size_bytes for file in files)
                whose = "" if trust.authentic(read_bytes(place, one)) else f"; {_NOT_OURS if trust.key else _NO_KEY}"
                click.echo(f"checkpoint {one}: intact, {len(files)} files, {human_bytes(size)}{whose}")
        if wrong:
            bad += 1
            click.echo(f"checkpoint {one}: NOT intact")
        for line in wrong:
            if line not in shown:
                click.echo(f"  {line}")
                shown.add(line)
    if bad:
        raise CheckpointError(f"{bad} of {len(numbers)} checkpoints in {place.url} are not intact, see above")


@checkpoint.command("compact")
@WHERE
@NUMBER
def compact_one(where: str, number: int | None) -> None:
    """Merge the full and the incremental snapshots of each partition into one file, of a job that has ended."""
    place = checkpoint_place(where)
    if (Path(where) / "job.json").exists() and in_use(Path(where)):
        raise ConfigError(f"{where}: this job is running and goes on from these files: compact when it has ended")
    manifest = _choose(place, number, deep=False)
    if manifest.replica is not None:
        raise ConfigError(
            f"{where}: checkpoint {manifest.checkpoint} is of mode allreduce: it has no incremental snapshots"
        )
    key = _key_of(where)
    data = read_bytes(place, manifest.checkpoint)
    if is_coded(data) and not ManifestTrust(key=key).authentic(data):
        raise ConfigError(
            f"{where}: checkpoint {manifest.checkpoint} was written with the key of a run: name the run's directory"
        )
    before = sum(place.sizes().values())
    new = compact(place, manifest, key if is_coded(data) else b"")
    files = sum(len(snapshot.files) for snapshot in manifest.snapshots)
    after = sum(place.sizes().values())
    click.echo(
        f"checkpoint {new.checkpoint}: {files} files are now {sum(len(i.files) for i in new.snapshots)}; "
        f"{human_bytes(before)} are now {human_bytes(after)}"
    )


@checkpoint.command("export")
@WHERE
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@NUMBER
@click.option("--table", "tables", multiple=True, help="Only this table (may be repeated).")
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "safetensors", "both"]),
    default="parquet",
    show_default=True,
    help="Of tables.",
)
def export(where: str, out: Path, number: int | None, tables: tuple[str, ...], form: str) -> None:
    """Export tables as Parquet or safetensors, and the dense part as dense.safetensors (a state_dict), into the
    directory OUT; of mode allreduce model.safetensors (the model's state_dict) and training.pt (optimizers and the
    rest, for torch.load). Nothing of it needs everstep to be read."""
    from everstep.protect.export import file_name, wanted_tables, write_dense, write_parquet, write_safetensors

    place = checkpoint_place(where)
    manifest = _choose(place, number, deep=True)
    trust = ManifestTrust(key=_key_of(where))
    if trust.key and not trust.authentic(read_bytes(place, manifest.checkpoint)):
        click.echo(f"everstep: checkpoint {manifest.checkpoint}: {_NOT_OURS}", err=True)
    if manifest.replica is not None:
        if tables and not manifest.tables:
            raise ConfigError(f"--table: checkpoint {manifest.checkpoint} is of mode allreduce and has no tables")
        from everstep.allreduce.replica_checkpoint import export_replica

        export_replica(place, manifest, out, click.echo)
        if not manifest.tables:
            return
    for spec in wanted_tables(manifest, tables):
        if form in ("parquet", "both"):
            path = out / f"{file_name(spec.name)}.parquet"
            click.echo(f"{path}: {write_parquet(place, manifest, spec, path):,} rows of {spec.name!r}")
        if form in ("safetensors", "both"):
            path = out / f"{file_name(spec.name)}.safetensors"
            click.echo(f"{path}: {write_safetensors(place, manifest, spec, path):,} rows of {spec.name!r}")
    if not tables and any(spec.dense for spec in manifest.tables):
        path = out / "dense.safetensors"
        click.echo(f"{path}: {write_dense(place, manifest, path)} parameters")


# ---------------------------------------------------------------- in words


def describe(place: StoragePlace, manifest: Manifest) -> list[str]:
    """Return one checkpoint for a person."""
    if manifest.replica is not None:
        return _describe_replica(place, manifest)
    files = {file for snapshot in manifest.snapshots for file in snapshot.files}
    longest = max((len(snapshot.files) for snapshot in manifest.snapshots), default=0)
    written = sum(snapshot.bytes_written for snapshot in manifest.snapshots)
    lines = [
        f"checkpoint {manifest.checkpoint} of job {manifest.job!r}, {_when(manifest.at)}, {place.url}",
        f"  written by everstep {manifest.everstep or '?'}, seed {manifest.seed}",
        f"  {len(manifest.snapshots)} of {manifest.partitions} partitions in {len(files)} files, "
        f"{human_bytes(sum(f.size_bytes for f in files))}; {human_bytes(written)} of it new; "
        + ("full" if longest <= 1 else f"up to {longest} files a partition (full and incremental)"),
        f"  {sum(snapshot.rows for snapshot in manifest.snapshots):,} rows, {manifest.samples_done:,} samples done",
    ]
    for spec in manifest.tables:
        rows = "" if spec.rows is None else f", {spec.rows:,} rows at most"
        kind = "dense, " if spec.dense else ""
        lines.append(
            f"  table {spec.name!r}: {kind}dim {spec.dim}, {spec.optimizer.kind} lr {spec.optimizer.lr:g}{rows}"
        )
    for dataset in manifest.datasets:
        for epoch in dataset.epochs:
            done = sum(hi - lo for lo, hi in epoch.done)
            lines.append(
                f"  {dataset.plan.name!r} epoch {epoch.epoch}: {done} shards done, {epoch.samples_done:,} samples"
            )
    lines += [f"  {name} = {value:g}" for name, value in sorted(manifest.values.items())]
    return lines


def _describe_replica(place: StoragePlace, manifest: Manifest) -> list[str]:
    replica = manifest.replica
    assert replica is not None
    position = replica.position
    where = replica.file.path
    if replica.parts:
        new = replica.written_bytes(manifest.checkpoint)
        where = f"{len(replica.parts)} stages and their index ({human_bytes(new)} of it new)"
    lines = [
        f"checkpoint {manifest.checkpoint} of job {manifest.job!r}, {_when(manifest.at)}, {place.url}",
        f"  written by everstep {manifest.everstep or '?'}, seed {manifest.seed}, mode "
        f"{'pipeline' if replica.parts else 'allreduce'}",
        f"  {human_bytes(replica.size_bytes)} in {where}: {replica.parameters:,} parameters, with the "
        "optimizers' state",
        f"  {position.step:,} steps, {manifest.samples_done:,} samples done",
    ]
    for number, dataset in enumerate(manifest.datasets):
        place_words = f"{dataset.finished_epochs} epochs done"
        if number == position.dataset:
            place_words += (
                f", goes on in epoch {position.epoch} at sample {position.sample:,} of {dataset.plan.samples:,}"
            )
        lines.append(f"  {dataset.plan.name!r}: {place_words}")
    if manifest.snapshots:
        rows, written = sum(i.rows for i in manifest.snapshots), sum(i.bytes_written for i in manifest.snapshots)
        names = ", ".join(repr(spec.name) for spec in manifest.tables)
        lines.append(f"  tables {names}: {rows:,} rows in {len(manifest.snapshots)} partitions, {human_bytes(written)}")
    return lines + [f"  {name} = {value:g}" for name, value in sorted(manifest.values.items())]


def _choose(place: StoragePlace, number: int | None, deep: bool) -> Manifest:
    if number is not None:
        return read_manifest(place, number)
    if deep:
        return latest_intact(place, tell=lambda line: click.echo(line, err=True))
    return read_manifest(place, need_checkpoints(place)[-1])


def _key_of(where: str) -> bytes:
    """Return the key of the run whose directory this is; empty: it is none, or has no secret any more."""
    secret = Path(where) / SECRET_FILE
    if "://" in where or not (Path(where) / "job.json").exists() or not secret.exists():
        return b""
    return load_secret(secret).checkpoint_key


def _unreadable(place: StoragePlace, manifest: Manifest) -> list[str]:
    """Return what would be refused where it is loaded, though every byte is right."""
    wrong = list(unloadable(place, manifest)) if manifest.snapshots else []
    if manifest.replica is not None:
        from everstep.allreduce.replica_checkpoint import read_replica, state_dicts

        try:
            state_dicts(read_replica(place, manifest), f"{place.url}/{manifest.replica.file.path}")
        except CheckpointError as error:
            wrong.append(str(error))
    return wrong


def _line(place: StoragePlace, number: int, sizes: dict[str, int]) -> dict[str, Any]:
    try:
        manifest = read_manifest(place, number)
    except CheckpointError as error:
        return {"checkpoint": number, "state": str(error).removeprefix(f"{place.url}/{manifest_name(number)} ")}
    files = set(manifest.files())
    wrong = list(problems(place, manifest, deep=False, sizes=sizes))
    replica = manifest.replica
    incrementals = any(len(snapshot.files) > 1 for snapshot in manifest.snapshots)
    return {
        "checkpoint": number,
        "at": manifest.at,
        "kind": "replica" if replica is not None else "incremental" if incrementals else "full",
        "rows": (replica.parameters if replica is not None else 0)
        + sum(snapshot.rows for snapshot in manifest.snapshots),
        "size_bytes": sum(file.size_bytes for file in files),
        "written_bytes": (replica.written_bytes(number) if replica is not None else 0)
        + sum(snapshot.bytes_written for snapshot in manifest.snapshots),
        "samples": manifest.samples_done,
        "state": "whole" if not wrong else f"{len(wrong)} files missing or cut",
    }


def _human(one: dict[str, Any]) -> dict[str, str]:
    if "at" not in one:
        return {}
    return {
        "taken": _when(one["at"]),
        "rows": f"{one['rows']:,}",
        "size": human_bytes(one["size_bytes"]),
        "written": human_bytes(one["written_bytes"]),
        "samples": f"{one['samples']:,}",
    }


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
