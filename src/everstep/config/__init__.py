"""Holds the settings of a job: it loads and checks them, and knows where each value came from."""
