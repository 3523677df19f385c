"""What keeping features or stored samples is worth over the epochs of a job."""
