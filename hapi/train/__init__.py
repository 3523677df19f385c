"""The trainer of hapi-train: steps, checkpoints, reports."""
