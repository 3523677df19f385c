"""Parts that several commands have: parsers, numbers, progress, writing to a store."""
