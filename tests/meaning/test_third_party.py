"""Third-party models train here what they train with plain PyTorch: each step's loss, and the loss on held-out data.

Their packages are no dependencies: a model whose package is missing is skipped, with a line that says so.
"""

from __future__ import annotations

import numpy as np
import pytest

from meaning.cells import alone, plain
from meaning.table import MODES, Row
from meaning.third_party import MODELS


def row_of(name: str) -> Row:
    return Row(name, "", "", MODELS[name].script, {}, {}, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["alone", "allreduce"])
@pytest.mark.parametrize("name", MODELS)
def test_a_third_party_model_has_the_loss_curve_of_plain_pytorch(name: str, mode: str) -> None:
    missing = MODELS[name].missing()
    if missing:
        pytest.skip(missing)
    row = row_of(name)
    wanted = plain(row, MODES[mode])
    got = alone(row, MODES[mode])
    np.testing.assert_allclose(got["each.loss"], wanted["each.loss"], rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(got["metric"], wanted["metric"], rtol=1e-2)
    assert wanted["each.loss"][-3:].mean() < wanted["each.loss"][:1].mean(), "it learns nothing"
