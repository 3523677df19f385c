"""Two tiers on one machine, and what benchmarks share."""
