"""Holds plain facts shared by all layers: structs, no logic, no I/O."""
