"""One training by several processes: torchrun's environment, and what they exchange."""
