"""Decoding and transforming samples, equal on both tiers."""
