"""Choosing the split, and following a link or server that changes."""
