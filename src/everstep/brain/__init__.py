"""Is the job's pure state machine: events in, instructions out; no I/O, no clock."""
