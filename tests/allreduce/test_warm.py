"""What is done before a process enters a group, so that nobody waits for it there."""

from __future__ import annotations

import pytest
import torch

from everstep.allreduce.warm_up import warm_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_warming_up_leaves_no_trace(dtype: torch.dtype) -> None:
    like = torch.zeros(3).to(dtype)
    before = torch.get_rng_state()
    with torch.no_grad():
        warm_up(like)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert like.grad is None and not like.to(torch.float32).any()
