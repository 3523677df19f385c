"""A fleet in simulated time, made of the cost model, the server's scheduler and the client's own choices."""
