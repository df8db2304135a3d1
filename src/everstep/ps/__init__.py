"""Is the server side of tables."""
