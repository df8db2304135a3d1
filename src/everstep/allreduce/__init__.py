"""Trains one model on every worker, elastically: in steps that commit at all survivors or at none."""
