"""Who has not proved itself yet has one of few places, which the newest get."""

from __future__ import annotations

import resource
import socket

import pytest

from everstep.net.strangers import Strangers, scarce


def test_the_oldest_of_the_address_with_most_goes() -> None:
    gone: list[str] = []
    strangers = Strangers(4)
    places = [strangers.enter(at, lambda name=name: gone.append(name)) for name, at in
              [("a0", "a"), ("b0", "b"), ("b1", "b"), ("a1", "a")]]  # fmt: skip
    assert not gone and len(strangers) == 4
    strangers.enter("b", lambda: gone.append("b2"))  # b has most now, with the newcomer
    assert gone == ["b0"] and len(strangers) == 4
    strangers.enter("c", lambda: gone.append("c0"))  # a and b have as many
    assert gone == ["b0", "a0"]
    for place in places:  # of which two were dropped
        strangers.leave(place)
    assert len(strangers) == 2
    for n in range(100):  # a flood of one address costs only itself
        strangers.enter("b", lambda n=n: gone.append(f"flood {n}"))
    assert "c0" not in gone and gone[2] == "b2" and len(gone) == 2 + 1 + 97 and len(strangers) == 4


def test_the_last_descriptors_are_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        for limit, kept_back in ((sock.fileno() + 1, True), (sock.fileno() + 1000, False), (100_000, False)):
            monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
            assert scarce(sock) == kept_back
