"""Loading of stored tensors: few ranges, memory that is used again, bytes checked as they arrive (DStore, 3 and 5)."""
