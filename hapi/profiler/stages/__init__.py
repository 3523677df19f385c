"""Seconds of the stages of a batch, and the epochs that they make."""
