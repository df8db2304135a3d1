"""What a training script touches."""
