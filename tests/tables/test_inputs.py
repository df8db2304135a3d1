"""Inputs of a machine: one at a time, in the order in which they came."""

import threading

import pytest

from everstep.tables.inputs import Inputs


def test_an_input_from_inside_an_action_waits_its_turn():
    done: list[str] = []

    def do(action: str) -> None:
        done.append(action)
        if action == "first":
            inputs.feed(lambda: ["fed by first"])
            assert done == ["first"]

    inputs = Inputs(threading.Condition(threading.RLock()), do)
    inputs.feed(lambda: ["first", "second"])
    assert done == ["first", "second", "fed by first"]


def test_after_an_action_that_fails_what_waited_is_done_with_the_next_input():
    done: list[str] = []

    def do(action: str) -> None:
        if action == "fails":
            inputs.feed(lambda: ["waited"])
            raise ValueError("fails")
        done.append(action)

    inputs = Inputs(threading.Condition(threading.RLock()), do)
    with pytest.raises(ValueError, match="fails"):
        inputs.feed(lambda: ["fails", "lost with it"])
    inputs.feed(lambda: ["next"])
    assert done == ["waited", "next"]


def test_who_waits_for_a_change_is_told():
    changed, state = threading.Condition(threading.RLock()), []
    inputs = Inputs(changed, state.append)
    with changed:
        feeder = threading.Thread(target=inputs.feed, args=(lambda: ["news"],))
        feeder.start()
        assert changed.wait_for(lambda: state, timeout=30)
    feeder.join(30)
