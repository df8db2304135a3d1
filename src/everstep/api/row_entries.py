"""Packs gradients of rows on their way from member to member of a group: tables, keys and gradients in one tensor."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from everstep.errors import InternalError
from everstep.ids import TableId

Entry = tuple[TableId, NDArray[np.int64], NDArray[np.float32]]
"""One table's part of one micro-batch: keys [u] and gradients [u, dim]."""


def pack(entries: list[Entry]) -> NDArray[np.uint8]:
    """Return int64: how many entries; of each table, rows and width; then of each the keys and the gradients (float32),
    padded to eight bytes."""
    head = np.array([len(entries), *(n for t, k, g in entries for n in (t, len(k), g.shape[1]))], np.int64)
    pieces = [head.view(np.uint8)]
    for _, keys, grads in entries:
        pieces += [np.ascontiguousarray(keys).view(np.uint8), np.ascontiguousarray(grads).reshape(-1).view(np.uint8)]
        pieces.append(np.zeros(-pieces[-1].nbytes % 8, np.uint8))
    return np.concatenate(pieces)


def unpack(blob: torch.Tensor) -> list[Entry]:
    """Return views of what ``pack`` made. Raises InternalError where it cannot be."""
    raw: NDArray[np.uint8] = blob.numpy()
    words = raw[: len(raw) // 8 * 8].view(np.int64)
    count = int(words[0]) if len(words) else -1
    if not 0 <= count <= (len(words) - 1) // 3:
        raise InternalError(f"gradients of rows: {count} tables in {len(raw)} bytes")
    out: list[Entry] = []
    at = 8 * (1 + 3 * count)
    for table, rows, dim in words[1 : 1 + 3 * count].reshape(-1, 3).tolist():
        size = 4 * rows * dim
        if rows < 0 or dim < 0 or at + 8 * rows + size > len(raw):
            raise InternalError(f"gradients of rows: {rows} x {dim} do not fit into {len(raw)} bytes")
        keys = raw[at : at + 8 * rows].view(np.int64)
        at += 8 * rows
        out.append((TableId(table), keys, raw[at : at + size].view(np.float32).reshape(rows, dim)))
        at += size + -size % 8
    return out
