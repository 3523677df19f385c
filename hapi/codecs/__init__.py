"""Codecs for the bytes of tensors: on the wire and at rest."""
