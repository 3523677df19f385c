"""Writing to a cache behind what computes: the line of what waits, and the codec of what is written."""
