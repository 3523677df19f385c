"""Model files of a training."""
