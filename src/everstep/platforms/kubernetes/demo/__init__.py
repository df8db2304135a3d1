"""Is a cluster without a cluster: a strict API server in memory and nodes that start pods as local processes."""
