"""Benchmarks of the server: memory, batching, concurrency, the wire, a GPU."""
