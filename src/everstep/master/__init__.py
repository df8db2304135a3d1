"""The shell round the brain: server, journal, timers."""
