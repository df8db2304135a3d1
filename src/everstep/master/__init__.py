"""Is the shell round the brain: server, journal, timers."""
