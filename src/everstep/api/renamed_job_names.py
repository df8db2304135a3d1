"""Gives a ``Job`` the names that have changed: they work for one version, and say so."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from everstep.api.job_place import JobPlace
from everstep.config.renamed import renamed_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _renamed(old: str, new: str) -> None:
    """Say in one line, once for each place in the script, that a name of ``Job`` has changed."""
    warnings.warn(renamed_line(old, new), FutureWarning, stacklevel=3)


class RenamedJobNames(JobPlace):
    """Gives a ``Job`` its old names."""

    @property
    def shards(self) -> int:
        """Is ``processes_per_worker`` under its old name, and says so."""
        _renamed("job.shards", "job.processes_per_worker")
        return self.processes_per_worker

    @property
    def shard(self) -> int:
        """Is ``process_index`` under its old name, and says so."""
        _renamed("job.shard", "job.process_index")
        return self.process_index

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Is ``device_mesh`` under its old name, and says so."""
        _renamed("job.shard_mesh", "job.device_mesh")
        return self.device_mesh
