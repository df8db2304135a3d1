"""Sums over the parts of a step of logical workers, with the same bits on any number of members.

The gradients of V parts are added in the order of one binary tree: the node of parts ``[a, b)`` is that of ``[a, m)``
plus that of ``[m, b)``, ``m`` halfway. Members hold contiguous parts. Each adds up the complete subtrees that it
covers; the flat memory is cut in one chunk per member, whose owner gets the subtrees' chunks of all members, finishes
the tree in order and sends the result to all. Addition commutes, so only the tree decides the bits.

Two members that hold the two halves of the tree have one addition left per element: an ordinary all-reduce has the same
bits then, and goes on bucket by bucket while backward runs.
"""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from everstep.allreduce.gradient_buckets import BucketLayout, GradientBuckets
from everstep.allreduce.step import GroupWork, StepAttempt

Range = tuple[int, int]
_EXACT = (torch.float32, torch.float64)  # gloo adds two of them as everybody does


def halves(node: Range) -> tuple[Range, Range]:
    a, b = node
    middle = (a + b + 1) // 2
    return (a, middle), (middle, b)


def subtrees(lo: int, hi: int, node: Range) -> list[Range]:
    """Return the largest nodes below ``node`` that lie within parts ``[lo, hi)``, in order."""
    a, b = node
    if b <= lo or hi <= a or lo >= hi:
        return []
    if lo <= a and b <= hi:
        return [node]
    left, right = halves(node)
    return subtrees(lo, hi, left) + subtrees(lo, hi, right)


def part_seed(seed: int, step: int, part: int) -> int:
    """Return the seed of the random state in which one part of one step is computed."""
    text = f"{seed}/{step}/{part}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class LoopStreams:
    """The random streams that a loop finds, put back behind it: what a script draws between its loops is the same on
    all workers, however many of the loop's batches each of them has computed."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if _cuda() else []
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        torch.default_generator.set_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class PartSums:
    """Holds the sums of one member's parts in one step, and exchanges them."""

    def __init__(self, layout: BucketLayout, parts: int) -> None:
        self.parts = parts
        self._layout = layout
        self._free: list[GradientBuckets] = []
        self._all: list[GradientBuckets] = []
        self._nodes: list[tuple[Range, GradientBuckets]] = []
        self._parents: dict[Range, Range] = {}
        self._learn((0, parts))

    def __repr__(self) -> str:
        return f"<PartSums {[n for n, _ in self._nodes]} of {self.parts} parts, {len(self._all)} sets>"

    def _learn(self, node: Range) -> None:
        if node[1] - node[0] > 1:
            for half in halves(node):
                self._parents[half] = node
                self._learn(half)

    def all(self) -> list[GradientBuckets]:
        return self._all

    def begin(self) -> None:
        """A new step: nothing is summed up yet."""
        self._nodes.clear()
        self._free = list(self._all)

    def take(self) -> GradientBuckets:
        """Return a set of flat tensors to fill; its old content is still there."""
        if not self._free:
            self._all.append(GradientBuckets(self._layout))
            self._free.append(self._all[-1])
        return self._free.pop()

    def push(self, part: int, buckets: GradientBuckets) -> None:
        """Add the sums of ``part``; parts come in order. ``buckets`` is changed later."""
        self._nodes.append(((part, part + 1), buckets))
        while len(self._nodes) > 1:
            (left, a), (right, b) = self._nodes[-2:]
            parent = self._parents.get(right)
            if parent is None or halves(parent)[0] != left:
                return
            a.add_(b)
            self._free.append(b)
            self._nodes[-2:] = [(parent, a)]

    def direct(self, step: StepAttempt) -> bool:
        """Return whether an all-reduce of what the two members have is the whole sum, in the tree's order."""
        if step.size != 2 or tuple(step.parts) != halves((0, self.parts)):
            return False
        return step.collective.host_sums and all(d in _EXACT for d, _ in self._layout.kinds)

    def fold(self, last: GradientBuckets, number: int) -> Tensor:
        """Return bucket ``number`` of this member's sum, where that is a whole node of the tree; each bucket once.
        ``last``: of its last part, complete in that bucket. What was pushed before it are the left siblings of its
        ancestors."""
        total = last.tensors[number]
        for _, sums in reversed(self._nodes):
            total = sums.tensors[number].add_(total)
        return total

    def folded(self, last: GradientBuckets) -> GradientBuckets:
        """Return where ``fold`` puts its sums."""
        return self._nodes[0][1] if self._nodes else last

    def result(self) -> GradientBuckets:
        """Return where ``exchange`` shall put the whole sum."""
        if len(self._nodes) == 1 and self._nodes[0][0] == (0, self.parts):
            return self._nodes[0][1]
        return self.take()

    def exchange(self, step: StepAttempt, result: GradientBuckets) -> None:
        """Sum over all members, in the tree's order, into ``result``. Raises what a broken collective raises."""
        if len(self._nodes) == 1 and self._nodes[0][1] is result:
            return
        for number, flat in enumerate(result.tensors):
            self._exchange(step, [s.tensors[number] for _, s in self._nodes], flat)

    def _exchange(self, step: StepAttempt, mine: list[Tensor], result: Tensor) -> None:
        group, n = step.collective, step.size
        bounds = [result.numel() * r // n for r in range(n + 1)]
        chunks = list(pairwise(bounds))
        lo, hi = chunks[step.rank]
        works: list[GroupWork] = []
        leaves: dict[Range, Tensor] = {}
        for peer, (a, b) in enumerate(step.parts):
            nodes = subtrees(a, b, (0, self.parts))
            if peer == step.rank:
                leaves |= {node: sums[lo:hi] for node, sums in zip(nodes, mine, strict=True)}
            elif hi > lo:
                for node in nodes:
                    leaves[node] = torch.empty(hi - lo, dtype=result.dtype, device=result.device)
                    works.append(group.recv(leaves[node], peer))
        for peer, (a, b) in enumerate(chunks):
            if peer != step.rank and b > a:
                works += [group.send(sums[a:b], peer) for sums in mine]
        for work in works:
            work.wait()
        if hi > lo:
            result[lo:hi].copy_(_finish((0, self.parts), leaves))
        works = []
        for peer, (a, b) in enumerate(chunks):
            if peer != step.rank:
                if b > a:
                    works.append(group.recv(result[a:b], peer))
                if hi > lo:
                    works.append(group.send(result[lo:hi], peer))
        for work in works:
            work.wait()


def _finish(node: Range, leaves: dict[Range, Tensor]) -> Tensor:
    """Return the sum of ``node``, in the tree's order; ``leaves`` are changed."""
    found = leaves.get(node)
    if found is not None:
        return found
    left, right = halves(node)
    return _finish(left, leaves).add_(_finish(right, leaves))
