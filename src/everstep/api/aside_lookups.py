"""Looks rows up outside of training: they are read, and never changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from everstep.api.batch_item import BatchItem
from everstep.api.nn import Lookup
from everstep.errors import ScriptError
from everstep.tables.client import PsClient
from everstep.tables.prefetch import view_key
from everstep.tables.routing import BatchRows

KEPT = 4
"""So many lookups are kept: what a model asks for of one batch comes with one pull."""
Wanted = list[tuple[str, list[Tensor]]]


class AsideLookups:
    """Looks up for an evaluation. Main thread."""

    def __init__(
        self,
        client: PsClient,
        siblings: Callable[[str, Tensor], Wanted],
        fetch: Callable[[BatchItem, Wanted], None],
        arrive: Callable[[BatchItem], None],
    ) -> None:
        """Take ``siblings``: what is looked up with this. ``fetch`` asks for rows, ``arrive`` waits for them."""
        self._client, self._siblings, self._fetch, self._arrive = client, siblings, fetch, arrive
        self._items: list[BatchItem] = []  # oldest first

    def __repr__(self) -> str:
        return f"<AsideLookups {len(self._items)}>"

    def lookup(self, table: str, ids: Tensor) -> Lookup:
        """Look up, read only, together with the lookups that will follow on the same tensor."""
        key, wanted_ids = (table, view_key(ids)), flat([ids])
        for item in self._items:
            known = item.lookups.get(key)
            if known is not None and np.array_equal(known.ids, wanted_ids):
                return Lookup(None, known.rows.values, known.inverse, known.ids, known.rows.padding_at)
        wanted = self._siblings(table, ids) or [(table, [ids])]
        if len(self._items) >= KEPT:
            self._items.pop(0).close()
        item = BatchItem(None, None, BatchRows(self._client.memory, self._client.router))
        try:
            self._fetch(item, wanted)
        except ScriptError:
            if len(wanted) == 1:
                item.close()
                raise
            self._fetch(item, [(table, [ids])])  # a sibling was a wrong guess
        self._arrive(item)
        self._items.append(item)
        known = item.lookups[key]
        return Lookup(None, known.rows.values, known.inverse, known.ids, known.rows.padding_at)

    def forget(self) -> None:
        """Free the rows of all lookups."""
        while self._items:
            self._items.pop().close()


def flat(views: Sequence[Tensor]) -> NDArray[np.int64]:
    """Return the ids of all views of one table, int64 [n], contiguous."""
    arrays = [ids.numpy().reshape(-1) for ids in views]
    return np.concatenate(arrays, dtype=np.int64)  # a copy: the script may write into its own
