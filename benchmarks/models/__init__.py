"""Stored models: how fast they are written and loaded, whole and in part, beside files of other kinds (DStore)."""
