"""History in the run directory stays small."""

from __future__ import annotations

from pathlib import Path

from everstep.monitor.rotated import RotatedFile


def test_it_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "x.jsonl", 1000)
    for i in range(500):
        file.write([b"%06d" % i])
    file.close()
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert len(sizes) == 2 and max(sizes) <= 1010
    assert (tmp_path / "x.jsonl").read_bytes().endswith(b"000499\n")


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    for text in (b"a", b"b"):
        file = RotatedFile(tmp_path / "x", 100)
        file.write([text])
        file.close()
    assert (tmp_path / "x").read_bytes() == b"a\nb\n"
