"""Virtual clock, network and faults round the same brain and protocol."""
