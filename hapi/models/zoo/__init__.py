"""Models by name, with weights, heads and freezes."""
