"""Choosing the COS batch."""
