"""The server side of tables."""
