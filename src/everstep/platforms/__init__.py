"""Where processes come from."""
