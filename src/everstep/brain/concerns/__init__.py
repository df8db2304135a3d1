"""What the brain takes care of, one concern a module: its handlers of facts, what it settles, and its invariants."""
