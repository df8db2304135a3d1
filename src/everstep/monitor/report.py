"""Holds what an audit found: offences, counts, notes, and how they read."""

from __future__ import annotations

from enum import StrEnum

import msgspec

_OFFENDERS_SHOWN = 50


class Verdict(StrEnum):
    """Says about the job the first of these that is true."""

    OFFENCES = "offences"
    WITNESS = "the witness differs"
    LOOPS = "loops differ"
    REPLICAS = "replicas differ"
    LOST = "result lost"
    FAILED = "failed"
    NOTHING = "nothing committed"
    OPEN = "not over"
    EXACT = "exactly once"


EXIT_CODES = {
    Verdict.EXACT: 0,
    Verdict.OFFENCES: 1,
    Verdict.WITNESS: 8,
    Verdict.LOOPS: 11,
    Verdict.LOST: 5,
    Verdict.REPLICAS: 6,
    Verdict.FAILED: 7,
    Verdict.NOTHING: 9,
    Verdict.OPEN: 10,
}
"""Of ``everstep audit``; 2: there is no such run."""


class Offence(msgspec.Struct, frozen=True, rename={"partitions": "buckets"}):
    """Is one thing that is not as promised. ``what``: missing, twice, outside, unknown lease, wrong worker, after
    fence, unknown shard, fingerprint, broken chain, sequence, bad record, no log."""

    what: str
    ps: str
    shard: str = ""
    lo: int = -1
    hi: int = -1
    partitions: str = ""
    detail: str = ""

    def __str__(self) -> str:
        where = f"{self.shard} [{self.lo}, {self.hi})" if self.lo >= 0 else self.shard
        parts = [f"{self.what}:", where, f"at {self.ps}", self.partitions, f"({self.detail})" if self.detail else ""]
        return " ".join(part for part in parts if part)


class AuditReport(msgspec.Struct):
    """Is what an audit found. ``finished``: epochs proven complete. ``counts``: what was looked at. ``loops``: what was
    trained in a loop of the script that did not ask for it. ``witness``: where a counting model says otherwise.
    ``verdict``: about the job, ``why``: in words."""

    run_dir: str
    finished: list[str] = []
    counts: dict[str, int] = {}
    offenders: list[Offence] = []
    skipped: list[str] = []
    notes: list[str] = []
    loops: list[str] = []
    witness: list[str] = []
    verdict: Verdict = Verdict.EXACT
    why: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def ok(self) -> bool:
        return not self.offenders

    def text(self) -> str:
        """Return the report for a person, several lines."""
        c = self.counts
        found = f"{len(self.offenders)} offences" if not self.ok else self.verdict
        lines = [f"audit of {self.run_dir}: {found}{f' ({self.why})' if self.why else ''}"]
        lines.append(f"  finished epochs: {', '.join(self.finished) or 'none yet'}")
        if "steps" in c:
            return "\n".join([*lines, *self._steps(), *self._end()])
        lines.append(
            f"  shards done {c['shards_done']}, samples of finished epochs {c['samples']:,}, batches applied"
            f" {c['batches']:,} at {c['ps']} ps x {c['buckets']} partitions, leases {c['leases']}"
        )
        lines.append(
            f"  ranges taken over in the middle {c['handovers']}, samples left out by the script"
            f" {c.get('left_out_samples', 0):,}, skipped samples {c['skipped_samples']}, quarantined shards"
            f" {c['quarantined']}"
        )
        if c.get("taken"):
            ways = ", ".join(
                f"{c[how]} {how}" for how in ("promoted", "rebuilt", "loaded", "resumed", "begun", "new") if c.get(how)
            )
            lines.append(
                f"  {c['taken']} partitions taken over ({ways}): {c['void']} intervals void, undone by crashes and"
                f" applied again; {c['vouched']} samples vouched for by watermarks alone"
            )
        lines.append(f"  fingerprints: {c['fingerprints']} compared at {c['cuts']} cuts")
        return "\n".join([*lines, *self._end()])

    def _steps(self) -> list[str]:
        """Return the lines of mode allreduce."""
        c = self.counts
        void = f", {c['void']:,} more void and done again" if c["void"] else ""
        logs = f"{c['logs']} workers' own logs" + (" agree with the journal" if self.ok and c["logs"] else "")
        lines = [
            f"  steps committed {c['steps']:,}{void}, samples of finished epochs {c['samples']:,}, skipped samples"
            f" {c['skipped_samples']}",
            f"  {c['generations']} generations of the group; {logs}",
        ]
        if c.get("ps"):
            lines.append(
                f"  tables: {c['batches']:,} steps applied at {c['ps']} ps x {c['buckets']} partitions,"
                f" {c.get('taken', 0)} taken over; {c['fingerprints']} fingerprints compared at {c['cuts']} cuts"
            )
        return lines

    def _end(self) -> list[str]:
        lines = [f"  skipped: {line}" for line in self.skipped[:_OFFENDERS_SHOWN]]
        lines += [f"  note: {line}" for line in self.notes]
        if "witnessed_samples" in self.counts:
            c = self.counts
            agrees = "differs" if self.witness else "agrees"
            steps = f" in {c['witnessed_steps']:,} steps" if c["witnessed_steps"] else ""
            lines.append(f"  the witness {agrees}: it counted {c['witnessed_samples']:,} samples{steps}")
        lines += [f"  WITNESS {line}" for line in self.witness[:_OFFENDERS_SHOWN]]
        lines += [f"  LOOP {line}" for line in self.loops[:_OFFENDERS_SHOWN]]
        lines += [f"  OFFENCE {offence}" for offence in self.offenders[:_OFFENDERS_SHOWN]]
        if len(self.offenders) > _OFFENDERS_SHOWN:
            lines.append(f"  ... and {len(self.offenders) - _OFFENDERS_SHOWN} more (all of them with --json)")
        return lines

    def json(self) -> bytes:
        """Return everything, for machines."""
        return msgspec.json.encode(
            {
                "ok": self.ok,
                "exit_code": self.exit_code,
                **msgspec.structs.asdict(self),
                "offenders": [str(o) for o in self.offenders],
            }
        )
