"""Every number from outside has a range, and what lies beyond it is refused where it enters."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from msgspec import inspect

from everstep.bounds import MEMBERS_MAX
from everstep.cli.main import cli
from everstep.config import load
from everstep.config.spec import JobSpec
from everstep.errors import WireError
from everstep.model.snapshot import Manifest
from everstep.net import auth, messages
from everstep.net.frames import decode_header
from everstep.net.rendezvous import MasterInfo

ROOTS: dict[str, Any] = {
    "requests": messages.Call,
    "data requests": messages.DataRequest,
    "handshake": auth._Message,
    "master.json": MasterInfo,
    "manifest": Manifest,
}


def numbers(t: Any, path: str, seen: set[type], extra: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every number below type ``t``: where it is, its type, and what its annotation says besides."""
    match t:
        case inspect.Metadata():
            yield from numbers(t.type, path, seen, {**extra, **(t.extra or {})})
        case inspect.StructType():
            if t.cls not in seen and t.cls is not JobSpec:  # (job.yaml has a test of its own)
                seen.add(t.cls)
                for field in t.fields:
                    yield from numbers(field.type, f"{t.cls.__name__}.{field.name}", seen, {})
        case inspect.UnionType():
            for one in t.types:
                yield from numbers(one, path, seen, extra)
        case inspect.TupleType():
            for one in t.item_types:
                yield from numbers(one, path, seen, extra)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            yield from numbers(t.item_type, path, seen, extra)
        case inspect.DictType():
            yield from numbers(t.key_type, path, seen, extra)
            yield from numbers(t.value_type, path, seen, extra)
        case inspect.IntType() | inspect.FloatType():
            yield path, t, extra
        case inspect.StrType() | inspect.BytesType() | inspect.BoolType() | inspect.NoneType():
            pass
        case inspect.EnumType() | inspect.LiteralType():
            pass
        case _:
            raise AssertionError(f"{path}: a type that this test does not know: {t}")


@pytest.mark.parametrize("root", ROOTS)
def test_every_number_from_outside_has_a_range(root: str) -> None:
    found = list(numbers(inspect.type_info(ROOTS[root]), root, set(), {}))
    assert len(found) > 2
    for path, t, extra in found:
        if extra.get("bits") == 64:  # the wire has no larger numbers
            assert t.ge == 0, path
        elif not extra.get("any"):
            assert t.ge is not None and t.le is not None, f"{path}: {t} has no range"


def test_few_numbers_may_be_anything() -> None:
    """Only what a script or a process measured of itself, and nothing that is counted to."""
    found = [n for root in ROOTS.values() for n in numbers(inspect.type_info(root), "", set(), {})]
    free = {path for path, _, extra in found if extra.get("any")}
    assert free == {"Beat.readings", "Beat.values", "ValuesReported.values", "Manifest.values"}


def test_every_number_of_a_job_has_a_range() -> None:
    hints = typing.get_type_hints(JobSpec)
    plain = {name for name, hint in hints.items() if hint in (int, float)}
    assert plain == set(load._RANGES)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (["node_joined", "n", "", 300_000_000, 0, []], "1024"),
        (["node_joined", "n", "", -1, 0, []], ">= 0"),
        (["shard_done", -(2**63), 0, []], ">= 0"),
        (["shard_done", 2**64 - 1, 0, []], "<="),
        (["scale_asked", "worker", MEMBERS_MAX + 1], str(MEMBERS_MAX)),
        (["drain_asked", "ps:0", float("nan")], ">= 0"),
        (["drain_asked", "ps:0", float("inf")], "<="),
        (["process_exited", "worker", 10**9, 1, 0], str(MEMBERS_MAX)),
        (["shard_asked", 0, 2**63 - 1, 1], "<="),
    ],
)
def test_what_lies_beyond_is_no_request(request_: list[Any], words: str) -> None:
    decoder = msgspec.msgpack.Decoder(messages.Call)
    with pytest.raises(WireError, match="malformed request") as error:
        decode_header(decoder, msgspec.msgpack.encode([1, request_]), "request")
    assert words in str(error.value)


@pytest.mark.parametrize("workers", ["300000000", "1025", "0", "-5"])
def test_an_agent_brings_as_many_workers_as_one_node_may_have(workers: str, tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    auth.create_secret(secret)
    argv = ["agent", "--join", "127.0.0.1:1", "--secret-file", str(secret), "--workers", workers]
    done = CliRunner().invoke(cli, argv)
    assert done.exit_code != 0
    text = f"{done.output}{done.exception}"
    assert f"--workers {workers}" in text and "1 to 1,024" in text
