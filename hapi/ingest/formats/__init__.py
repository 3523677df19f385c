"""Foreign formats that are indexed in place: one module each, and :mod:`hapi.ingest.formats.registry`."""
