"""Reads batches for a loop of mode ps: takes the next work, waits for its turn, reads its samples, asks for its rows.

Where rows are pulled ahead a thread of its own does so, as many batches ahead as it has permits.
"""

from __future__ import annotations

import queue
import threading
import time

from everstep.api.batch_item import BatchItem
from everstep.api.protocol_driver import ProtocolDriver
from everstep.api.schedule_waits import ScheduleWaits
from everstep.api.tables import TableSet
from everstep.data.loader import Loader
from everstep.data.random_streams import STREAMS
from everstep.model.shard import split_key


class BatchReader:
    """Those of one pass through ``job.steps``. ``ahead``: batches whose rows are pulled ahead; 0: each when it is
    taken, and by the script's thread."""

    def __init__(
        self, loader: Loader, prefetch: int, driver: ProtocolDriver, tables: TableSet, waits: ScheduleWaits
    ) -> None:
        self._loader, self._driver, self._tables, self._waits = loader, driver, tables, waits
        self._ready: queue.SimpleQueue[BatchItem | BaseException | None] = queue.SimpleQueue()
        self._permits = threading.Semaphore(prefetch)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._prefetch, name="everstep-reader", daemon=True)
            self._thread.start()

    def __repr__(self) -> str:
        return f"<BatchReader {'prefetches' if self.prefetch else 'in turn'} of {self._loader}>"

    @property
    def prefetch(self) -> bool:
        """Return whether rows are pulled ahead."""
        return self._thread is not None

    def next(self) -> BatchItem | None:
        """Return the next batch, its rows asked for; None: all data is done, or the loop is to end. Raises the
        failure."""
        return self._read() if self._thread is None else self._from_thread()

    def taken(self) -> None:
        """The script has taken a batch: one more may be pulled ahead."""
        self._permits.release()

    def wanted(self, item: BatchItem) -> bool:
        """Return whether a batch is still wanted. False, and it is given up, where its lease is gone or was opened
        anew."""
        work, driver = item.work, self._driver
        assert work is not None
        with driver.lock:
            if driver.protocol.current(work):
                return True
            self._give_up(item)
            driver.feed(lambda: driver.protocol.computed(work))
            return False

    def put_back(self, item: BatchItem) -> None:
        """Sync: a step was cut off in front of this batch, which belongs to the next one. The batch is handed out
        again, so that it begins with that step, and its rows are pulled when the step before it is applied. Raises the
        failure."""
        assert item.work is not None
        self._waits.put_back(item.work)
        self._give_up(item)

    def _give_up(self, item: BatchItem) -> None:
        """The script does not get this batch: one more may be pulled ahead."""
        item.close()
        self.taken()

    def stop(self) -> None:
        """The loop is over: no work is taken any more."""
        self._stop.set()

    def close(self) -> None:
        """End the thread, behind ``stop``, and give up what it has read."""
        if self._thread is None:
            return
        with self._driver.lock:
            self._driver.changed.notify_all()
        self._permits.release()
        self._thread.join(timeout=5.0)
        while not self._ready.empty():
            unread = self._ready.get()
            if isinstance(unread, BatchItem):
                unread.close()

    def _read(self) -> BatchItem | None:
        """Take work, read its batch, ask for its rows. None when all data is done."""
        while (work := self._waits.work(self._stop)) is not None:
            _, epoch, _ = split_key(work.lease.shard)
            batch = self._loader.read(epoch, work.lo, work.hi)
            if self._waits.turn(work, self._stop, self.prefetch):
                return self._tables.prepare(work, batch, create=True)
        return None

    def _prefetch(self) -> None:
        try:
            while True:
                while not self._permits.acquire(timeout=0.5):
                    if self._stop.is_set() or self._driver.ending.failure is not None:
                        return
                item = None if self._stop.is_set() else self._read()
                self._ready.put(item)
                if item is None:
                    return
        except BaseException as error:
            self._ready.put(error)

    def _from_thread(self) -> BatchItem | None:
        begin = time.perf_counter()
        ending = self._driver.ending
        while True:
            try:
                with STREAMS.lent():
                    got = self._ready.get(timeout=0.2)
                break
            except queue.Empty:
                ending.check()
                if ending.stopping:
                    return None
        self._tables.wait_s += time.perf_counter() - begin
        if isinstance(got, BaseException):
            raise got
        return got
