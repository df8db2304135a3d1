"""The rows, one file a topic. A row is a function that gets a module in the place of ``everstep`` and trains."""
