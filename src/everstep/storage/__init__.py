"""Makes bytes durable: chained logs, atomic files, checksums."""
