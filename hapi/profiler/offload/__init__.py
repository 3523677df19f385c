"""Choices around optimiser states that are kept outside the memory."""
