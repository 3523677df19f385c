"""A compute device: its memory, resident layers and forward passes."""
