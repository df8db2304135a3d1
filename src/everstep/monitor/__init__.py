"""Has readings, the event log, the summary, the audit and the read model."""
