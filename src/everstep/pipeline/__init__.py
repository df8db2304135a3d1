"""Trains a model that is cut into stages, one process each (mode pipeline)."""
