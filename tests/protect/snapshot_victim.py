"""Takes two checkpoints, a base and an increment, of a store that trains between them: to be killed at any moment."""

import sys
from pathlib import Path

from snapshot_stores import checkpoint, new_store, train, writer_of


def main(where: Path) -> None:
    store = new_store()
    writer = writer_of(store)
    train(store, 0, 2)
    checkpoint(writer, where, 1)
    train(store, 2, 3, keys=100)
    checkpoint(writer, where, 2, since=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
