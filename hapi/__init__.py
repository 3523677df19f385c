"""Hapi: near-data transfer learning over an object store."""

__version__ = "0.1.0"
