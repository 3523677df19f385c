"""What a training minimises, and what it counts."""
