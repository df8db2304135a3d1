"""What outlives a ps: mirrors at other ps, images in checkpoints."""
