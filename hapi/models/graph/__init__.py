"""Any module as an ordered list of layers: tracing, cuts, segments, digests. Pure torch."""
