"""Where samples to be packed come from."""
