"""Pushed models as conforming safetensors files, whole or in part, in one file or in shards with an index."""
