"""Checkpoints: their content, their files, and when they are written."""
