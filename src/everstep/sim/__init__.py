"""Puts a virtual clock, network and faults round the same brain and protocol."""
