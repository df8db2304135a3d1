"""Sources -> shards -> batches."""
