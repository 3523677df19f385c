"""Benchmarks of the split: the sweep and its views, overlap, changing links."""
