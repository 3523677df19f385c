"""Indexing foreign shards where they are."""
