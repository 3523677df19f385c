"""Labels in tables beside the samples: read, understood, and brought to the files that they name."""
