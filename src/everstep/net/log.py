"""Logs one line for each bad connection, and no flood of them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from everstep.errors import escaped, escaped_lines

logger = logging.getLogger("everstep.net")


class LineLimit:
    """Allows at most ``lines`` warnings in ``span_s`` seconds; the next one after a gap says how many were left out."""

    def __init__(self, lines: int = 20, span_s: float = 10.0) -> None:
        self._lines = lines
        self._span_s = span_s
        self._lock = threading.Lock()
        self._since = 0.0
        self._count = 0

    def warning(self, text: str) -> None:
        now = time.monotonic()
        left_out = 0
        with self._lock:
            if now - self._since >= self._span_s:
                left_out = max(0, self._count - self._lines)
                self._since, self._count = now, 0
            self._count += 1
            if self._count > self._lines:
                return
        logger.warning("%s%s", text, f" ({left_out} more like this were not logged)" if left_out else "")


class PlainFormatter(logging.Formatter):
    """Control characters of a message (of a stranger's names, say) are escaped: a record is one line, and its traceback
    has the lines that Python gave it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message, 1 << 16)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return escaped_lines(super().formatException(ei))


def log_plainly(pattern: str, level: int = logging.WARNING) -> None:
    """Send the records of this process to stderr, by ``pattern``."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(pattern))
    logging.basicConfig(handlers=[handler], level=level)
