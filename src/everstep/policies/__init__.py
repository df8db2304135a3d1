"""Pure choices over facts."""
