"""Receiving batches ahead of the training step."""
