"""What one worker knows of its group; pure."""
