"""The job spec: loading, checking, origins of values."""
