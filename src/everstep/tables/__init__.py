"""Is the worker's side of tables: protocol, routing, prefetch."""
