"""Makes keys for tables without a vocabulary: fields that share one table, and crosses of fields."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from everstep.data.order import UInt64s, make_key, mix64s

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def _bits(values: torch.Tensor) -> UInt64s:
    return values.to(torch.int64).contiguous().numpy().view(np.uint64)


def _keys(mixed: UInt64s) -> torch.Tensor:
    return torch.from_numpy((mixed >> np.uint64(1)).view(np.int64))


def field_keys(values: torch.Tensor) -> torch.Tensor:
    """Return keys in ``[0, 2**63)`` of ``values`` (int64 [n, fields]), so that all fields may share one table: equal
    values of different fields get different keys."""
    salts = np.array([make_key(field, 0xF1E1D) for field in range(values.shape[1])], np.uint64)
    with np.errstate(over="ignore"):
        return _keys(mix64s(_bits(values) * _GOLDEN + salts))


def cross(*columns: torch.Tensor) -> torch.Tensor:
    """Return one key in ``[0, 2**63)`` (int64 [n]) per combination of the values of ``columns`` (each int64 [n])."""
    with np.errstate(over="ignore"):
        key = np.zeros(len(columns[0]), np.uint64)
        for column in columns:
            key = mix64s((key ^ mix64s(_bits(column) + _GOLDEN)) * _GOLDEN + np.uint64(1))
    return _keys(key)
