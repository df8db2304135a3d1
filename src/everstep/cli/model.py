"""Does what ``everstep run`` does last: it sees that the job's model is where it shall be, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from everstep.agent.agent import JobOutcome
from everstep.brain.checkpoints import leaves_model
from everstep.cli.display import read_summary
from everstep.config.spec import JobSpec
from everstep.errors import EverstepError
from everstep.net.auth import load_secret
from everstep.net.rendezvous import SECRET_FILE
from everstep.protect.manifest import ManifestTrust, read_manifest
from everstep.protect.model import (
    IN_RUN_DIR,
    MODEL_LIMIT_BYTES,
    About,
    loads_with,
    model_folder,
    model_url,
    too_large,
    write_about,
    write_tables,
)
from everstep.protect.sources import own_url
from everstep.storage.atomic import write_atomic
from everstep.storage.places import open_place

RESULT_LOST = 5
_ENDED = ("done", "stopped")


def leave_model(spec: JobSpec, run_dir: Path, outcome: JobOutcome) -> tuple[JobOutcome, list[str]]:
    """Leave the model, out of the checkpoint that the job ended with; return the outcome with what came of that, and
    lines for the summary."""
    summary = read_summary(run_dir)
    if not leaves_model(spec) or summary is None or summary.phase not in _ENDED or not summary.samples_done:
        return outcome, []
    url = model_url(spec, run_dir)
    try:
        if not summary.checkpoint:
            return outcome, [f"model: not left at {url}: {_why_not(run_dir)}"]
        place = open_place(own_url(spec, run_dir))
        key = load_secret(run_dir / SECRET_FILE).checkpoint_key
        manifest = read_manifest(place, summary.checkpoint, ManifestTrust(key=key, digests=spec.trusted))
        size_bytes = sum(file.size_bytes for file in manifest.files())
        if spec.model_to == IN_RUN_DIR and size_bytes > MODEL_LIMIT_BYTES:
            return outcome, [f"model: not left: {too_large(size_bytes)}"]
        with model_folder(url) as folder:
            write_tables(place, manifest, folder)
            about = write_about(folder, url, spec.name, summary.checkpoint, manifest.samples_done, summary.steps)
    except EverstepError as error:
        way_out = f"everstep checkpoint export {run_dir} OUT"
        text = f"the job ended, and its model could not be left at {url}: {error}; {way_out}"
        failed = JobOutcome(RESULT_LOST, text) if outcome.exit_code == 0 else outcome
        return failed, [f"model: {text}"]
    _note(run_dir, url, about)
    return outcome, _lines(run_dir, url, about)


def _lines(run_dir: Path, url: str, about: About) -> list[str]:
    total = sum(about.files.values())
    lines = [f"model: {url} ({len(about.files)} files, {total:,} bytes); go on from it: everstep resume {run_dir}"]
    how = loads_with(url, about.files)
    return [*lines, f"  {how}"] if how else lines


def _note(run_dir: Path, url: str, about: About) -> None:
    """Note it in summary.json, for programs."""
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text())
    summary["model"] = {"url": url, "load": loads_with(url, about.files), **msgspec.to_builtins(about)}
    write_atomic(path, json.dumps(summary, indent=2).encode() + b"\n")


def _why_not(run_dir: Path) -> str:
    """Return the reason of the last checkpoint that was given up, if one was."""
    try:
        lines = (run_dir / "events.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in reversed(lines):
        if '"checkpoint given up"' in line:
            return str(json.loads(line).get("reason", ""))
    return "the job ended at once, or before there was anything to save"
