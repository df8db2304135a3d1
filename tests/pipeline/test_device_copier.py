"""The copier of devices does what the native one does; on the CPU its decisions, on a GPU (where there is one) all of
it."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from everstep.allreduce.state import ReplicaState
from everstep.native import crc32c
from everstep.pipeline.device_copier import CudaStream, DeviceCopier, HostCopier, HostStream, copier_for
from everstep.pipeline.slot_memory import BLOCK_BYTES
from everstep.pipeline.state_layout import StateLayout

torch.set_num_threads(1)
BLOCK = 1 << 12


def layout_of(device: str = "cpu", width: int = 90) -> StateLayout:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 7)).to(device)
    model.register_buffer("seen", torch.ones(3, device=device))
    opt = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    return StateLayout(ReplicaState([model], [opt], {}))


def slot(layout: StateLayout, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Memory for a copy, full of other bytes."""
    return np.full(layout.size_bytes, 0xEE, np.uint8), np.zeros(-(-layout.size_bytes // block), np.uint32)


class GatedStream(HostStream):
    """Lets copies go one at a time."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def copy(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.began.release()
        assert self.may_end.acquire(timeout=20.0)
        super().copy(pieces)


def test_it_writes_what_the_native_copier_writes() -> None:
    layout = layout_of(width=400)
    layout.capture()
    a, b = slot(layout, BLOCK_BYTES), slot(layout, BLOCK_BYTES)
    native, mine = HostCopier(), DeviceCopier(HostStream(3 * BLOCK_BYTES))
    native.load(layout, *a)
    native.finish()
    mine.load(layout, *b)
    assert mine.finish() == layout.size_bytes and mine.left == 0
    assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
    mine.end()


def test_a_chunk_is_begun_in_a_wait_only_and_at_most_one_ends_behind_it() -> None:
    layout = layout_of()
    layout.capture()
    stream = GatedStream(2 * BLOCK)
    copier = DeviceCopier(stream, BLOCK)
    copier.load(layout, *slot(layout))
    assert not stream.began.acquire(timeout=0.05)  # no wait has begun
    copier.open(1 << 40)
    assert stream.began.acquire(timeout=20.0)
    copier.close()
    stream.may_end.release()
    assert not stream.began.acquire(timeout=0.05)
    assert copier.counts()[:4] == (0, 2 * BLOCK, 0, 1)
    copier.open(2 * BLOCK)  # room for one
    assert stream.began.acquire(timeout=20.0)
    stream.may_end.release()
    assert not stream.began.acquire(timeout=0.05)
    assert copier.counts()[:4] == (2 * BLOCK, 2 * BLOCK, 0, 1)
    copier.open(2 * BLOCK - 1)  # too little
    assert not stream.began.acquire(timeout=0.05)
    copier.end()


def test_what_is_in_the_making_is_waited_for_before_the_optimizer_steps() -> None:
    layout = layout_of()
    layout.capture()
    stream = GatedStream(2 * BLOCK)
    copier = DeviceCopier(stream, BLOCK)
    body, sums = slot(layout)
    copier.load(layout, body, sums)
    copier.open(1 << 40)
    assert stream.began.acquire(timeout=20.0)
    for _ in range(100):
        stream.may_end.release()
    rest = copier.finish()
    inside, late, stalled, _, _ = copier.counts()
    assert rest == stalled and inside + late + stalled == layout.size_bytes
    assert all(crc32c(body[n * BLOCK : (n + 1) * BLOCK].data) == one for n, one in enumerate(sums.tolist()))
    copier.end()


@pytest.mark.parametrize("seed", range(10))
def test_whatever_waits_there_are_each_copy_is_whole(seed: int) -> None:
    draws = random.Random(seed)
    layout = layout_of()
    copier = DeviceCopier(HostStream(draws.randrange(1, 5) * BLOCK), BLOCK)
    truth = slot(layout)
    for _ in range(5):
        for tensor, _ in layout.held:
            tensor.add_(1)
        body, sums = slot(layout)
        copier.load(layout, body, sums)
        for _ in range(draws.randrange(4)):
            copier.open(draws.choice((0, BLOCK, 3 * BLOCK, 1 << 40)))
            if draws.random() < 0.5:
                threading.Event().wait(0.001)
            copier.close()
        if draws.random() < 0.2:
            copier.drop()
            assert copier.left == 0
            continue
        copier.finish()
        check = DeviceCopier(HostStream(8 * BLOCK), BLOCK)
        check.load(layout, *truth)
        check.finish()
        check.end()
        assert np.array_equal(body, truth[0]) and np.array_equal(sums, truth[1])
    copier.end()


def test_a_state_on_the_cpu_is_copied_by_native_code() -> None:
    assert isinstance(copier_for(torch.device("cpu")), HostCopier)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_state_on_a_gpu_is_what_it_was_before_the_optimizer_stepped() -> None:
    """The device is far behind the thread that trains, when the copy begins and when the optimizer steps."""
    layout = layout_of("cuda", 1024)
    copier = copier_for(layout.device)
    assert isinstance(copier, DeviceCopier) and isinstance(copier._stream, CudaStream)
    body, sums = slot(layout, BLOCK_BYTES)
    large = torch.randn(4096, 4096, device="cuda")
    for value in range(3):
        for _ in range(20):
            large = (large @ large).clamp(-1, 1)
        with torch.no_grad():
            for tensor, _ in layout.held:
                tensor.fill_(value)
        copier.load(layout, body, sums)
        copier.open(1 << 40)
        copier.close()
        copier.finish()
        with torch.no_grad():
            for tensor, _ in layout.held:
                tensor.fill_(99)  # (what the optimizer does)
        torch.cuda.synchronize()
        for tensor, at in layout.held:
            size = tensor.numel() * tensor.element_size()
            found = torch.from_numpy(body[at : at + size]).view(tensor.dtype)
            assert bool((found == value).all())
    copier.end()
