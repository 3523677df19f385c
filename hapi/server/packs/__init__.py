"""Packs of stored tensors, given by ranges of HTTP."""
