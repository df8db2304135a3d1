"""Turns sources into shards, and shards into batches."""
