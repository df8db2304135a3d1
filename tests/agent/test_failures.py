"""What an exception may come from."""

from __future__ import annotations

import errno
import http.client

import pytest
import torch

from everstep.agent.script_failures import cause_of


class EndpointConnectionError(Exception):
    """As botocore has one: no OSError."""


class ParseError(Exception):
    pass


def raised_from(outer: Exception, inner: Exception) -> BaseException:
    try:
        try:
            raise inner
        except Exception as error:
            raise outer from error
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TypeError("a"), "script"),
        (KeyError("a"), "script"),
        (AssertionError(), "script"),
        (IndexError("a"), "script"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "script"),
        (OSError(errno.EIO, "Input/output error"), "data"),
        (OSError("unable to read"), "data"),
        (ConnectionResetError(), "data"),
        (TimeoutError(), "data"),
        (EOFError(), "data"),
        (EndpointConnectionError("s3"), "data"),
        (http.client.IncompleteRead(b""), "data"),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), "data"),
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "script"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "node"),
        (PermissionError(errno.EACCES, "Permission denied"), "node"),
        (ModuleNotFoundError("No module named 'x'"), "node"),
        (OSError(errno.ENOSPC, "No space left on device"), "node"),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), "script"),
        (raised_from(ParseError("row 3"), ConnectionResetError()), "data"),
        (raised_from(ParseError("row 3"), ValueError("x")), "script"),
    ],
)
def test_cause(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause
