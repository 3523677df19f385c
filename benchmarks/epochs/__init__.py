"""Whole jobs of several epochs: Hapi with its cache beside what one does without it."""
