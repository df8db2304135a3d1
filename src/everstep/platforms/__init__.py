"""Says where processes come from."""
