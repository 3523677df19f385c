"""Packs: immutable files of tensors that models share, found by content."""
