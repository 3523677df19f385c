"""Training beyond the memory of the trainer: optimiser states and activations on disk (LoHan, arXiv 2403.06504)."""
