"""One line for each bad connection, and no flood of them."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("everstep.net")


class LineLimit:
    """At most ``lines`` warnings in ``span_s`` seconds; the next one after a gap says how many were left out."""

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
