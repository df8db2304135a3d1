"""Takes a torch ``DataLoader`` as a source: what it says is done here, or refused in one line."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from everstep.errors import DataError

_ELSEWHERE: Final = {
    "sampler": (
        "everstep deals out the samples itself; leave it out (shuffle= and seed= say the order), or draw from it once: "
        "job.loader(torch.utils.data.Subset(dataset, list(sampler)), ..., shuffle=False)"
    ),
    "batch_sampler": (
        "everstep cuts batches itself, so that a lost one can be read again; leave it out, or give batches as the "
        "samples "
        "of a dataset, with batch_size=1 and a collate_fn= that takes the only one"
    ),
    "num_workers": "the loader reads in the worker's own process; leave it out, and use more workers (everstep run "
    "--workers)",
    "generator": "the order is a function of seed= and the epoch, so that every worker knows it; leave it out, and "
    "give seed=",
    "worker_init_fn": (
        "the loader has no processes of its own; leave it out: what __getitem__ draws comes from a stream of the sample"
    ),
    "prefetch_factor": "the loader reads one batch ahead by itself; leave it out",
    "persistent_workers": "the loader has no processes of its own; leave it out",
    "multiprocessing_context": "the loader has no processes of its own; leave it out",
    "timeout": "the loader has no processes of its own; leave it out",
    "pin_memory": "leave it out, and move batches with .to(job.device)",
    "pin_memory_device": "leave it out, and move batches with .to(job.device)",
    "in_order": "batches of a shard come in order; leave it out",
}
"""Options of torch's DataLoader that job.loader has not, and what to do instead."""


def refuse(options: dict[str, Any], where: str) -> None:
    """Raise DataError for the first of ``options`` that is torch's and asks for something; TypeError for one that
    nobody knows."""
    for name, value in options.items():
        if name not in _ELSEWHERE:
            raise TypeError(f"job.loader() got an unexpected keyword argument {name!r}")
        if value not in (None, 0, False) or (name == "in_order" and not value):
            if name == "in_order" and value:
                continue
            raise DataError(f"{where}: {name}={_shown(value)}: {_ELSEWHERE[name]}")


class Unpacked(NamedTuple):
    """Holds what a DataLoader says."""

    dataset: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    collate_fn: Any


def unpack(loader: DataLoader[Any]) -> Unpacked:
    """Return what ``loader`` says. DataError for what cannot be kept; worker processes and pinned memory change nothing
    in the batches, and are left out."""
    where = "torch DataLoader"
    sampler = loader.sampler
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(f"{where}: {type(loader).__name__} makes its batches itself: give job.loader its dataset")
    if loader.batch_size is None:
        if loader.batch_sampler is None:
            raise DataError(f"{where}: batch_size=None (samples instead of batches): give job.loader the dataset")
        raise DataError(f"{where}: batch_sampler={_shown(loader.batch_sampler)}: {_ELSEWHERE['batch_sampler']}")
    if loader.worker_init_fn is not None:
        raise DataError(f"{where}: worker_init_fn={_shown(loader.worker_init_fn)}: {_ELSEWHERE['worker_init_fn']}")
    if isinstance(sampler, DistributedSampler):
        shuffle = sampler.shuffle  # everstep divides the samples itself
    elif type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            raise DataError(
                f"{where}: RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples:,}): "
                f"{_ELSEWHERE['sampler']}"
            )
        shuffle = True
    elif type(sampler) is SequentialSampler or type(sampler).__name__ == "_InfiniteConstantSampler":
        shuffle = False
    else:
        raise DataError(f"{where}: sampler={_shown(sampler)}: {_ELSEWHERE['sampler']}")
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    return Unpacked(loader.dataset, loader.batch_size, shuffle, loader.drop_last, collate_fn)


def _shown(value: Any) -> str:
    if isinstance(value, int | float | str | bool):
        return repr(value)
    return getattr(value, "__name__", type(value).__name__)
