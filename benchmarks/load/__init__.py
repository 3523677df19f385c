"""Benchmarks of a server that many ask at once: overload, tenants, siege."""
