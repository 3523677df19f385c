"""Worth of keeping features or stored samples over the epochs of a job."""
