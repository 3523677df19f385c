"""Bytes of saved activations: what a layer may keep, what it has, and what was moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LayerRoom:
    """Bytes that one layer may keep in each tier, and those that it has there now."""

    kept_limit: int = 0
    host_limit: int = 0
    kept: int = 0
    host: int = 0


@dataclass
class Counters:
    """Totals since the beginning."""

    written_bytes: int = 0
    read_bytes: int = 0
    host_bytes: int = 0
    waited_seconds: float = 0.0
    stored_tensors: int = 0
    shared_tensors: int = 0
    peak_bytes: int = 0
    """Most saved bytes on the device at once: kept, leaving, read back, and those that somebody else still uses."""
    live_bytes: int = 0
    asked: int = 0
    """Tensors that backward asked for."""
