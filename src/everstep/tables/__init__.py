"""The worker side of tables: protocol, routing, prefetch."""
