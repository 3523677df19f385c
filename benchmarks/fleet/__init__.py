"""Fleets: real servers and trainers beside the simulator, and what the simulator tells of larger ones."""
