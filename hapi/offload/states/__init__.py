"""Master weights and optimiser states outside the training's memory: on disks, or in the host's memory."""
