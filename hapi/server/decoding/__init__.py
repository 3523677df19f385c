"""Decoding in processes of their own."""
