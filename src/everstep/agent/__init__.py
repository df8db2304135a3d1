"""Starts, watches and stops the processes of one node."""
