"""Pushed models: tensors in layer order, read by range."""
