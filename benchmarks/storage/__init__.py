"""Benchmarks of the dataset store: reading samples, the index, shuffling."""
