"""One per node: starts, watches and stops processes."""
