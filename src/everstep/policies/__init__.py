"""Makes pure choices over facts."""
