"""Cuts, orders and reads a source as torch batches. Reads any range of positions; holds no progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader

from everstep.data.columns import ColumnsLike, Dtypes, Fill
from everstep.data.dataset import Collate, DatasetSource
from everstep.data.order import Int64s, sample_seeds, shuffled, window_shuffled
from everstep.data.random_streams import DrawWatch, batch_seed, in_streams_of
from everstep.data.shard_schedule import make_plan
from everstep.data.source import MEMORY_BYTES, DataSource, open_source
from everstep.data.split import DataSplit, parse_split
from everstep.data.torchloader import refuse, unpack
from everstep.errors import DataError, ScriptError
from everstep.model.shard import ShardSchedule

TensorBatch = dict[str, torch.Tensor]
Transform = Callable[[Any], Any]
_PROBES: Final = 8  # first calls of a transform of which each is watched for draws; later one of _PROBE_EVERY is
_PROBE_EVERY: Final = 64
_STRETCH = 4096  # positions whose rows are worked out at once: for a small batch alone that costs more than reading it


class Loader:
    """Loads the samples of ``source`` for ``epochs`` epochs; the same order for the same seed, however many workers
    read it.

    - ``split="90/10"`` holds out a fixed, seeded share (``split_seed``; not the training seed, so that runs with
      different seeds are tested on the same rows); ``eval_batches`` reads it.
    - ``columns``: names, or ``{"dense": ["a", "b"], "label": "y"}``; a list becomes one [rows, len] tensor.
    - ``dtypes``: data keep their types; ``{"dense": "float32"}`` where another one is wanted, ``"float32"`` alone for
    every
      column of floats. Columns of text become keys (``"hash"``) or lists of str (``"str"``).
    - ``collate_fn(samples)`` makes the batch of a map-style dataset; without it ``default_collate`` does.
    - ``transform(batch)`` is applied to each batch of tensors, in training and evaluation; it must treat rows
      independently, for a range may be read again in other cuts.
    - ``largest_batch``: so many samples fit into *this* worker at once, forward and backward (None: nobody knows; each
      worker may say another number, ``batch_size`` is the same for all). Where a policy divides steps, a worker may
      get passes of up to so many; a batch that is larger it computes in several passes of one step.
    - ``seeds=True`` adds ``batch["seeds"]``, int64 [rows]: a seed for each (sample, epoch), for augmentation.
    - ``draws=False``: neither the dataset nor ``collate_fn`` nor ``transform`` draws random numbers from the streams of
      torch, numpy and random. Without that word a dataset is read while the script waits, not beside it.

    ``source`` may be torch's DataLoader: its dataset, batch_size, shuffle, drop_last and collate_fn are taken.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        split: str | float | None = None,
        split_seed: int = 0,
        columns: ColumnsLike = None,
        dtypes: Dtypes = None,
        fill: Fill = None,
        collate_fn: Collate | None = None,
        transform: Transform | None = None,
        seeds: bool = False,
        draws: bool = True,
        name: str = "train",
        memory_bytes: int = MEMORY_BYTES,
        largest_batch: int | None = None,
        **of_torch: Any,
    ) -> None:
        refuse(of_torch, f"loader {name!r}")
        if isinstance(source, DataLoader):
            unpacked = unpack(source)
            source, collate_fn = unpacked.dataset, collate_fn or unpacked.collate_fn
            batch_size = unpacked.batch_size if batch_size is None else batch_size
            shuffle = unpacked.shuffle if shuffle is None else shuffle
            drop_last = unpacked.drop_last if drop_last is None else drop_last
        if batch_size is None:
            raise DataError(f"loader {name!r} needs a batch_size=")
        shuffle, drop_last = shuffle is not False, bool(drop_last)
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise DataError(f"epochs={epochs!r} of loader {name!r}: must be a whole number of at least 1")
        if largest_batch is not None and (
            isinstance(largest_batch, bool) or not isinstance(largest_batch, int) or largest_batch < 1
        ):
            raise DataError(
                f"largest_batch={largest_batch!r} of loader {name!r}: must be a whole number of at least 1, "
                "the samples that fit into this worker at once; leave it out where nobody knows"
            )
        self.name, self.batch_size, self.epochs = name, batch_size, epochs
        self.largest_batch = largest_batch or 0  # 0: unknown
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        share = parse_split(split)
        self.source: DataSource | DatasetSource = open_source(
            source, columns, dtypes=dtypes, fill=fill, memory_bytes=memory_bytes, collate_fn=collate_fn
        )
        self.transform = transform
        self._seeds = seeds
        self._draws = draws
        self.apart = False
        """Random numbers that reading draws come from streams of the sample, apart from the script's. Else they "
        "come from
        the script's own, as with torch's DataLoader without workers."""
        self._repeats = False
        self.comes_again = False
        """Positions of an epoch behind the first one were read."""
        self._transforming = DrawWatch()
        self._transformed = 0  # calls
        self._known: tuple[int, int, Int64s] = (-1, 0, np.empty(0, np.int64))  # epoch, position, rows from there on
        self._split = DataSplit(len(self.source), share, split_seed)
        if self._split.train < 1:
            raise DataError(f"split={split!r} of {len(self.source):,} rows leaves no rows to train on")
        if share < 1.0 and self._split.test < 1:
            raise DataError(f"split={split!r} of {len(self.source):,} rows leaves no rows to test on")
        self._plan = make_plan(
            name, self._split.train, batch_size, seed, drop_last, f"{self.source.fingerprint()}-{share:g}-{shuffle:d}"
        )

    def __repr__(self) -> str:
        return f"<Loader {self.name!r} {self._plan.samples:,} samples x {self.epochs} epochs, batch {self.batch_size}>"

    @property
    def samples(self) -> int:
        """Return the positions of an epoch: training samples, after drop-last."""
        return self._plan.samples

    @property
    def test_samples(self) -> int:
        """Samples held out by the split."""
        return self._split.test

    @property
    def may_draw(self) -> bool:
        """Return whether reading may draw; it then puts the streams back, and is not done beside the script."""
        draws = isinstance(self.source, DatasetSource) and self.source.draws
        return self.apart and self._draws and (draws or self.transform is not None)

    def plan(self) -> ShardSchedule:
        return self._plan

    def repeat_first(self, samples: int) -> None:
        """Have each epoch be the first ``samples`` samples of the first one, before anything is read: a probe wants to
        see the same keys again."""
        plan = self._plan
        few = max(self.batch_size, min(samples, plan.samples))
        self._plan = make_plan(self.name, few, self.batch_size, plan.seed, self.drop_last, plan.fingerprint)
        self._repeats = True

    def indices(self, epoch: int, lo: int, hi: int) -> Int64s:
        """Return the rows of the source (int64 [hi - lo]) at positions ``[lo, hi)`` of ``epoch``."""
        self.comes_again = self.comes_again or epoch > 0
        if self._repeats:
            epoch = 0
        if not 0 <= lo <= hi <= self._plan.samples:
            raise DataError(f"positions [{lo}, {hi}) of loader {self.name!r}, which has {self._plan.samples:,} samples")
        known_epoch, at, rows = self._known
        if epoch != known_epoch or lo < at or hi > at + len(rows):
            at, rows = lo, self._rows(epoch, lo, min(max(hi, lo + _STRETCH), self._plan.samples))
            self._known = epoch, at, rows
        return rows[lo - at : hi - at].copy()

    def _rows(self, epoch: int, lo: int, hi: int) -> Int64s:
        positions = np.arange(lo, hi, dtype=np.int64)
        # The whole training side is permuted, also where drop-last reads only the head of it: each epoch drops others.
        n = self._split.train
        if self.shuffle and self.source.chunk:
            positions = window_shuffled(positions, n, self.source.chunk, self.seed, epoch)
        elif self.shuffle:
            positions = shuffled(positions, n, self.seed, epoch)
        return self._split.train_samples(positions)

    def read(self, epoch: int, lo: int, hi: int) -> Any:
        """Return the samples at positions ``[lo, hi)`` of ``epoch``: of columns key -> tensor [hi - lo, ...]; otherwise
        what collate_fn makes."""
        return self._batch(self.indices(epoch, lo, hi), epoch)

    def eval_batches(self, batch_size: int | None = None) -> Iterator[Any]:
        """The held-out side once, in a fixed order, in batches of ``batch_size`` (default: the training one)."""
        size = self.batch_size if batch_size is None else batch_size
        if size < 1:
            raise DataError(f"batch_size={size} for evaluation: must be at least 1")
        if self._split.test < 1:
            raise DataError(f'loader {self.name!r} holds no rows out; give split="90/10"')
        for lo in range(0, self._split.test, size):
            ranks = np.arange(lo, min(lo + size, self._split.test), dtype=np.int64)
            yield self._batch(self._split.test_samples(ranks), 0)

    def _batch(self, rows: Int64s, epoch: int) -> Any:
        if isinstance(self.source, DatasetSource):
            batch = self._of_dataset(self.source, rows, sample_seeds(rows, self.seed, epoch), epoch)
        else:
            batch = {key: as_torch(array) for key, array in self.source.read(rows).items()}
        if self._seeds:
            if not isinstance(batch, dict):
                raise DataError(
                    f"seeds=True of loader {self.name!r}: its batches are {type(batch).__name__}, which has no key "
                    "'seeds'; "
                    "give a dataset of dicts, or columns="
                )
            batch["seeds"] = torch.from_numpy(sample_seeds(rows, self.seed, epoch))
        return batch if self.transform is None else self._transform(batch, rows, epoch)

    def _of_dataset(self, source: DatasetSource, rows: Int64s, seeds: Int64s, epoch: int) -> Any:
        if not len(rows):
            raise DataError(f"loader {self.name!r}: no samples to make a batch of")
        if not (self.apart and self._draws and source.draws):
            return source.collate(source.fetch(rows, seeds, apart=False))
        samples = source.fetch(rows, seeds, apart=True)
        if source.collate_fn is None:
            return source.collate(samples)
        return in_streams_of(batch_seed(self.seed, epoch, int(rows[0])), lambda: source.collate(samples))

    def _transform(self, batch: Any, rows: Int64s, epoch: int) -> Any:
        """Apply ``transform`` in streams of the batch, where it draws; it is watched for that, but not each time."""
        transform = self.transform
        assert transform is not None
        if not (self.apart and self._draws and len(rows)):
            return transform(batch)
        self._transformed += 1
        if not self._transforming.drawn and self._transformed > _PROBES and self._transformed % _PROBE_EVERY:
            return transform(batch)
        seed = batch_seed(self.seed, epoch, int(rows[0]))
        return in_streams_of(seed, lambda: transform(batch), self._transforming)


def left_before(plan: ShardSchedule) -> ScriptError:
    """Return what to raise for a loop over a dataset of which the script left its last loop in the midst: it would go
    on with what that has left, and plain PyTorch begins a new epoch."""
    return ScriptError(
        f"job.steps() again over dataset {plan.name!r}, of which this script left its last loop before the end: "
        "it would go on there, and plain PyTorch begins a new epoch. Make it one loop (job.loader(..., epochs=N)) that "
        "is left once, or give each loop data of its own (job.loader(part, name=...))"
    )


def as_torch(array: np.ndarray[Any, Any]) -> Any:
    """Return ``array`` as a tensor of the same type; text as a list."""
    return array.tolist() if array.dtype == object else torch.from_numpy(array)
