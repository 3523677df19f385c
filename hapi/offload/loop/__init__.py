"""Knowledge of a user's loop: its gradients, what it does to them, and what offloading costs it."""
