"""What is told of a script's error."""

from __future__ import annotations

import pytest
import torch.utils.data

from everstep.agent.worker_process import with_advice


def test_an_error_that_advises_to_make_a_process_group_comes_with_what_to_do_here() -> None:
    with pytest.raises(ValueError, match="process group") as raised:
        torch.utils.data.DistributedSampler(range(3))  # type: ignore[arg-type]
    assert with_advice(str(raised.value)).endswith("takes their place)")
    assert with_advice("KeyError: 'x'") == "KeyError: 'x'"
