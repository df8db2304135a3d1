"""Carries bytes: frames, messages, authentication, deadlines, the one retry helper."""
