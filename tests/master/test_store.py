"""The store over which members of a group meet."""

from __future__ import annotations

import asyncio

import pytest

from everstep.brain.events import Ok, Refused
from everstep.master import store_server as module
from everstep.master.store_server import MAX_KEY_BYTES, MAX_VALUE_BYTES, StoreServer
from everstep.net.messages import StoreValues


def test_who_waits_gets_all_keys_at_once_when_the_last_is_set() -> None:
    async def story() -> None:
        store = StoreServer()
        waiting = store.get(1, "a", ["x", "y"], 30.0)
        assert isinstance(waiting, asyncio.Future)
        assert store.set(1, "a", {"x": b"1"}) == Ok()
        assert store.set(1, "b", {"y": b"of another attempt"}) == Ok()
        assert store.set(2, "a", {"y": b"of another generation"}) == Ok()
        await asyncio.sleep(0)
        assert not waiting.done()
        assert store.set(1, "a", {"y": b"2"}) == Ok()
        assert await waiting == StoreValues({"x": b"1", "y": b"2"})
        assert store.get(1, "a", ["y"], 30.0) == StoreValues({"y": b"2"})
        assert "0 waiting" in repr(store)

    asyncio.run(story())


def test_after_the_time_those_that_are_there() -> None:
    async def story() -> None:
        store = StoreServer()
        store.set(1, "a", {"x": b"1"})
        assert store.get(1, "a", ["x", "z"], 0.0) == StoreValues({"x": b"1"})
        waiting = store.get(1, "a", ["x", "z"], 0.01)
        assert isinstance(waiting, asyncio.Future)
        assert await asyncio.wait_for(waiting, 30.0) == StoreValues({"x": b"1"})
        assert "0 waiting" in repr(store)

    asyncio.run(story())


def test_one_who_hangs_up_is_forgotten() -> None:
    async def story() -> None:
        store = StoreServer()
        waiting = store.get(1, "a", ["x"], 30.0)
        assert isinstance(waiting, asyncio.Future)
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert "0 waiting" in repr(store)
        assert store.set(1, "a", {"x": b"1"}) == Ok()

    asyncio.run(story())


def test_old_generations_are_over() -> None:
    async def story() -> None:
        store = StoreServer()
        store.set(1, "a", {"x": b"1"})
        waiting = store.get(1, "a", ["y"], 30.0)
        assert isinstance(waiting, asyncio.Future)
        store.forget(4)
        assert await waiting == StoreValues({})
        assert store.get(1, "a", ["x"], 0.0) == Refused("generation 1 is over")
        assert store.set(1, "a", {"x": b"1"}) == Refused("generation 1 is over")
        assert store.set(2, "a", {"x": b"1"}) == Ok()
        assert "1 attempts, 2 bytes" in repr(store)

    asyncio.run(story())


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 4 * MAX_VALUE_BYTES)

    async def story() -> None:
        store = StoreServer()
        assert isinstance(store.set(1, "a", {"x": bytes(MAX_VALUE_BYTES + 1)}), Refused)
        assert isinstance(store.set(1, "a", {"x" * (MAX_KEY_BYTES + 1): b""}), Refused)
        assert isinstance(store.set(1, "a" * (MAX_KEY_BYTES + 1), {"x": b""}), Refused)
        assert isinstance(store.get(1, "a", ["x"], float("nan")), Refused)
        kept = [store.set(1, str(i), {"x": bytes(MAX_VALUE_BYTES)}) for i in range(module.MAX_BYTES // MAX_VALUE_BYTES)]
        assert kept[0] == Ok() and isinstance(kept[-1], Refused), "what is full takes no more"

    asyncio.run(story())
