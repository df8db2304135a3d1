"""Elastic data parallelism: one model on every worker, trained in steps that commit at all survivors or at none."""
