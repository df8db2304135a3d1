"""Gives each ps of a benchmark an emulated service time, from its birth on: for ``autoscale``.

This folder is put on ``PYTHONPATH`` of the benchmark's own jobs. A ps then serves one request at a time, as if it had
one core: a pull or a push takes it so many seconds for each row (``ps_row_s`` of the file of demands), in which it
sleeps. Other processes are left alone.
"""

from __future__ import annotations

import sys

if "everstep.ps" in sys.orig_argv:
    import threading
    import time
    from typing import Any

    from benchmarks._demands import Demands

    from everstep.net.messages import Pull, Push
    from everstep.ps.service import PsService

    _lock = threading.Lock()
    _free_at = 0.0
    _demands = Demands()
    _handle = PsService.handle

    def handle(self: PsService, request: Any, body: memoryview, arena: memoryview | None) -> Any:
        """Answer as the ps does, and no sooner than one core of the emulated machine would."""
        global _free_at
        if not isinstance(request, Pull | Push):
            return _handle(self, request, body, arena)
        cost_s = _demands.now().ps_row_s * sum(part.n for part in request.parts)
        with _lock:
            _free_at = until = max(time.monotonic(), _free_at) + cost_s
        reply = _handle(self, request, body, arena)
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(left_s)
        return reply

    PsService.handle = handle  # type: ignore[method-assign]
