"""Sources of samples to pack."""
