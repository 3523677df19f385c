"""Training beyond the trainer's memory, beside AdamW in memory and other ways of saving it (LoHan, Figures 5 to 10)."""
