"""Features kept on the trainer's side: read instead of asked for, and filled behind the training."""
