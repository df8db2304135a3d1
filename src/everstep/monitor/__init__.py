"""Readings, the event log, the summary."""
