"""One writer at a time: leases on names in a store."""
