"""Commands that take things out of a store."""
