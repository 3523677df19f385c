"""Features that requests share: those under way, recent ones, and those kept on the disk."""
