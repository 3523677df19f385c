"""Ranges of objects that a server gives over HTTP."""
