"""Frames, messages, authentication, deadlines, the one retry helper."""
