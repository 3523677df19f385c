"""Making datasets: packing and indexing in place."""
