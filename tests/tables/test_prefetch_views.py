"""Predictions of which view of a batch each table will be asked for."""

from __future__ import annotations

import torch

from everstep.tables.prefetch import Predictor, view_key


def batch(rows: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {
        "cat": torch.arange(start, start + rows * 4).reshape(rows, 4),
        "x": torch.randn(rows),
        "id": torch.arange(rows),
    }


def test_columns_are_predicted_for_the_next_batch_also_when_it_is_shorter() -> None:
    predictor, first = Predictor(), batch(8)
    asked = {f"t{i}": first["cat"][:, i : i + 1] for i in range(4)} | {"id": first["id"]}
    for name, ids in asked.items():
        assert predictor.learn(name, ids, first)
    for rows in (8, 3):
        later = batch(rows, 100)
        predicted = dict(predictor.predict(later))
        assert set(predicted) == set(asked)
        for i in range(4):
            (ids,) = predicted[f"t{i}"]
            assert view_key(ids) == view_key(later["cat"][:, i : i + 1])
            assert torch.equal(ids, later["cat"][:, i : i + 1])
        assert torch.equal(predicted["id"][0], later["id"])


def test_whole_flat_and_transposed_views() -> None:
    predictor, first = Predictor(), batch(6)
    views = {
        "whole": lambda b: b["cat"],
        "flat": lambda b: b["cat"].view(-1),
        "two": lambda b: b["cat"][:, 1:3],
        "column": lambda b: b["cat"][:, 2],
    }
    for name, view in views.items():
        assert predictor.learn(name, view(first), first)
    for rows in (6, 2):
        later = batch(rows, 50)
        predicted = dict(predictor.predict(later))
        for name, view in views.items():
            assert torch.equal(predicted[name][0], view(later)), name
            assert view_key(predicted[name][0]) == view_key(view(later)), name


def test_nested_batches() -> None:
    first = (torch.randn(3), [{"a": torch.arange(3)}, torch.arange(6).reshape(3, 2)])
    later = (torch.randn(3), [{"a": torch.arange(3) + 9}, torch.arange(6).reshape(3, 2) + 9])
    predictor = Predictor()
    assert predictor.learn("a", first[1][0]["a"], first)  # type: ignore[index]
    assert predictor.learn("b", first[1][1][:, 1], first)  # type: ignore[index]
    predicted = dict(predictor.predict(later))
    assert predicted["a"][0].tolist() == [9, 10, 11] and predicted["b"][0].tolist() == [10, 12, 14]


def test_computed_ids_are_not_learned() -> None:
    predictor, first = Predictor(), batch(4)
    assert not predictor.learn("t", first["id"] % 3, first)
    assert predictor.predict(batch(4)) == []


def test_other_layouts_are_not_predicted() -> None:
    predictor, first = Predictor(), batch(4)
    predictor.learn("t", first["cat"][:, 0], first)
    wider = {"cat": torch.zeros(4, 5, dtype=torch.int64)}
    assert predictor.predict(wider) == []
    assert predictor.predict({"other": first["cat"]}) == []
    assert predictor.predict({"cat": first["cat"].to(torch.int32)}) == []


def test_a_change_in_place_is_seen() -> None:
    ids = torch.arange(5)
    before = view_key(ids[1:])
    ids += 1
    assert view_key(ids[1:]) != before


def test_unused_predictions_are_forgotten() -> None:
    predictor, first = Predictor(), batch(4)
    predictor.learn("t", first["cat"][:, 0], first)
    predictor.learn("u", first["cat"][:, 1], first)
    for i in range(20):
        later = batch(4, i)
        predictor.used({"t": {view_key(later["cat"][:, 0])}}, predictor.predict(later))
    assert [name for name, _ in predictor.predict(batch(4))] == ["t"]


def test_siblings_of_a_lookup_in_an_unknown_batch() -> None:
    predictor, first = Predictor(), batch(8)
    for i in range(4):
        predictor.learn(f"t{i}", first["cat"][:, i : i + 1], first)
    other = batch(5, 1000)["cat"]
    found = dict(predictor.siblings("t2", other[:, 2:3]))
    assert set(found) == {"t0", "t1", "t2", "t3"}
    for i in range(4):
        assert torch.equal(found[f"t{i}"][0], other[:, i : i + 1])
    narrow = torch.arange(10).reshape(5, 2)
    assert predictor.siblings("t1", narrow[:, 1:2]) == []
