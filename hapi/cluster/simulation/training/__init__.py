"""One trainer in simulated time: its batches, its requests, its choices of servers and splits."""
