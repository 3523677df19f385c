"""A server process from its start to its end: signals, log, audit, descriptors, stuck work."""
