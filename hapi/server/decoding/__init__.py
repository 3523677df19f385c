"""Decoding in separate processes."""
