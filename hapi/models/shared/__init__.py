"""Frozen weights that the processes of one machine hold once."""
