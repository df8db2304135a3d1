"""Holds machines that every host of them shares: no clock, no threads, no sockets."""
