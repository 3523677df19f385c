"""Activations kept, swapped to host memory or disk, or computed a second time, layer by layer."""
