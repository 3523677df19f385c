"""Delivery of batches: what came of them becomes what the trained layers take."""
