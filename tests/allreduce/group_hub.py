"""What the master does for groups that connect, in this process: a key-value store that answers later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from everstep.brain.events import Ok
from everstep.net import messages
from everstep.net.messages import RequestType, StoreGet, StoreSet, StoreValues


class Hub:
    """``runtime.ask`` of every member. ``values`` by (generation, attempt)."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], dict[str, bytes]] = {}
        self.said: list[RequestType] = []
        self._changed = threading.Condition()

    def ask(self, request: RequestType, then: Callable[[Any], None]) -> None:
        with self._changed:
            self.said.append(request)
        if isinstance(request, StoreSet):
            with self._changed:
                self.values.setdefault((request.generation, request.attempt), {}).update(request.values)
                self._changed.notify_all()
            then(Ok())
        elif isinstance(request, StoreGet):
            threading.Thread(target=self._answer, args=(request, then), daemon=True).start()
        else:
            then(Ok())

    def forget(self) -> None:
        """A new master's store is empty."""
        with self._changed:
            self.values.clear()

    def gets(self) -> int:
        return sum(isinstance(request, messages.StoreGet) for request in self.said)

    def _answer(self, request: StoreGet, then: Callable[[Any], None]) -> None:
        def there() -> dict[str, bytes]:
            values = self.values.get((request.generation, request.attempt), {})
            return {key: values[key] for key in request.keys if key in values}

        with self._changed:
            self._changed.wait_for(lambda: len(there()) == len(request.keys), request.wait_s)
            found = there()
        then(StoreValues(found))
