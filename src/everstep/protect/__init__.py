"""Keeps what outlives a ps: mirrors at other ps, snapshots in checkpoints."""
