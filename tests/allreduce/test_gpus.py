"""Groups on real GPUs: `pytest -m gpu`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from device_members import LONG_S, connected, redone_leaves_no_trace, waits

from everstep.allreduce import devices
from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.devices import Way
from everstep.allreduce.gradient_buckets import digest
from everstep.allreduce.nccl import NcclGroup
from everstep.net.retry import Deadline

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
with_nccl = pytest.mark.skipif(devices.nccl_backend() is None, reason="this torch has no NCCL")


def test_a_gpu_computes_the_digest_of_the_host() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        flat = torch.randn(5001).to(dtype)
        assert digest(flat.to(FIRST)) == digest(flat)
        flat[77] = float("inf")
        assert digest(flat.to(FIRST)) == digest(flat)


def test_members_that_share_a_gpu_reduce_by_way_of_the_host() -> None:
    with connected(2, [FIRST, FIRST]) as group:
        assert [c.chosen.way for c in group] == [Way.STAGED] * 2
        tensors = [torch.full((1 << 20,), float(c.rank + 1), device=FIRST) for c in group]

        def reduces(rank: int) -> None:
            for _ in range(2):  # the second time in the same memory
                group[rank].allreduce(tensors[rank]).wait(LONG_S)

        with ThreadPoolExecutor(2) as members:  # each begins gloo's part when its own copy has come
            list(members.map(reduces, range(2)))
        assert all(bool((t == 6.0).all()) for t in tensors)


def test_a_redone_step_leaves_no_trace_on_a_gpu_and_its_state_goes_to_the_host_and_back() -> None:
    redone_leaves_no_trace(FIRST)


class OnlyMember:
    """The host of an NCCL group of one."""

    rank, size, name, broken, waiting_since = 0, 1, "1.0", "", 0.0

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def parted(self) -> bool:
        return False

    def abort(self, why: str = "") -> None:
        self.broken = self.broken or why

    def error(self, error: Exception | None) -> CollectiveError:
        return CollectiveError(self.broken)


@with_nccl
def test_nccl_connects_reduces_and_is_aborted() -> None:
    group = NcclGroup(OnlyMember(), FIRST, devices.nccl_backend())
    assert group.connect(Deadline(LONG_S)), group.why
    tensor = torch.full((1000,), 3.0, device=FIRST)
    group.allreduce(tensor).wait(LONG_S)
    assert bool((tensor == 3.0).all())
    group.abort()
    with pytest.raises(CollectiveError):
        group.allreduce(tensor)
    until = Deadline(LONG_S)
    while group._group is not None:  # nothing of it is left when the process ends
        until.check()
        time.sleep(0.01)


@two_gpus
@with_nccl
def test_two_gpus_reduce_over_nccl_and_a_member_that_leaves_frees_the_other() -> None:
    with connected(2, [FIRST, SECOND]) as group:
        assert [c.chosen.way for c in group] == [Way.NCCL] * 2
        tensors = [torch.full((1 << 20,), float(rank + 1), device=at) for rank, at in enumerate((FIRST, SECOND))]
        works = [c.allreduce(t) for c, t in zip(group, tensors, strict=True)]
        for work in works:
            work.wait(LONG_S)
        assert all(bool((t == 3.0).all()) for t in tensors)
        thread, raised = waits(group[0], FIRST)
        group[1].abort("it left")
        thread.join(LONG_S)
        assert len(raised) == 1
        assert float(torch.ones(4, device=FIRST).sum()) == 4.0  # the device goes on
