"""``python -m everstep.master RUN_DIR``: started, and started again, by the agent of node0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from everstep.master.server import serve
from everstep.platforms.local import die_with_parent


def main() -> int:
    if len(sys.argv) != 2:
        print("everstep: usage: python -m everstep.master RUN_DIR", file=sys.stderr)
        return 2
    die_with_parent(os.getppid())
    return serve(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
