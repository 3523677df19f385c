"""Measurements of the whole: the two-tier test bed, the wire beside plain sockets, the tiers' overlap."""
