"""Figures of a plan, and the HTML report of a run."""
