"""Durable bytes: chained logs, atomic files, checksums."""
