"""Checkpoints on this machine as sources of tensors: described by their headers, and read piece by piece."""
