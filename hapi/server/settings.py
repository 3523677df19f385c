"""What an operator can set. Defaults say where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from hapi.server.http.slow_reader import PaceLimits

MAX_COS_BATCH = 1000
"""Samples of the largest COS batch of ``adaptive`` and ``auto`` (the earlier text's requests)."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server process; those of ``hapi-server``.

    >>> import hapi
    >>> hapi.ServerSettings(store="s3://bucket/hapi", device="cuda:0,cuda:1").batching
    'auto'
    """

    store: str
    """URL or folder of the object store."""
    batching: str = "auto"
    """How the COS batch is chosen: ``fixed``, ``adaptive`` or ``auto``."""
    cos_batch: int | None = None
    """Always so many samples per forward pass and frame, whatever ``batching`` says."""
    device_memory: int | None = None
    """Bytes of each device for weights and forward passes; None for a share of what is free at the start."""
    host_memory: int | None = None
    """Bytes of the server's own memory for what requests read, decode and send; None for a share of what is free."""
    max_image_pixels: int | None = None
    """Largest image that is decoded; None for 89 million pixels, which is the most."""
    merge: int = 0
    """Samples up to which forward passes of different requests through the same layers run as one; 0: never."""
    max_running: int = 4
    """Requests worked on at a time, for each device (HAPI, section 5.1), and one more of a tenant that asks rarely."""
    max_queued: int = 128
    """Requests that may wait; beyond it a request gets 429 with Retry-After."""
    max_request_seconds: float = 600.0
    """Longest time that a request may wait in the queue or a slow reader may take, in seconds."""
    send_timeout: float = 60.0
    """Longest silence of a reader, in seconds, before its request is dropped."""
    slow_reader_rate: int = 1024
    """Bytes per second that a reader must take while others wait for a slot or for its device's memory; 0: any. Ten
    requests that share 1 Mbit/s get 12,500 each (docs/decisions/0022-slow-readers.md has the slowest)."""
    slow_reader_seconds: float = 30.0
    """Seconds over which that is measured."""
    model_cache_bytes: int = 4 << 30
    """Budget for resident frozen layers that are kept for later requests."""
    max_model_bytes: int = 8 << 30
    """Largest model that is built from the zoo for a request; a pushed one is read layer by layer instead."""
    model_reuse: bool = True
    """Keep frozen layers between requests; the paper's default is to load them for each (section 5.1)."""
    chunk_cache_bytes: int | None = None
    """Chunks of small samples kept for all data sets; 0: every sample is read by itself; None: as suits the store."""
    max_frame_bytes: int = 256 << 20
    """Bound for a COS batch's inputs and for its outputs; the COS batch shrinks to stay below."""
    max_layer_bytes: int = 1 << 30
    """Bound for a COS batch's data at any layer; the COS batch shrinks to stay below (VGG19 at 224: 83 samples)."""
    max_response_bytes: int = 16 << 30
    """Largest answer to one request."""
    device: str = "auto"
    """``auto`` (CUDA when there is one), ``cpu``, ``cuda`` or ``cuda:N``; several GPUs with commas between them."""
    threads: int | None = None
    """Threads of one forward pass on the CPU; None leaves torch's choice."""
    decode_threads: int = 1
    """Threads that decode the samples of one COS batch, or of a process's part of it."""
    decode_processes: int = 0
    """Processes that decode; they pay for small samples only (docs/decisions/0027-decoding.md)."""
    allow_models: tuple[str, ...] = ()
    """``package.module:factory`` entries that clients may name; nothing else is ever imported for them."""
    drain_seconds: float = 30.0
    """Time that running requests get after SIGTERM."""
    scrub_rate: int = 0
    """Bytes per second of what is served that are read to find damage; 0: none."""

    max_connections: int | None = None
    """Connections in all; None for what the limit of open files allows."""
    max_connections_per_address: int | None = None
    """Of one client's address; None for half of them all."""
    tell_store: bool = False
    """Errors tell clients where the store lies and what is in it: only its owner asks."""
    stuck_seconds: float = 60.0
    """Seconds without a step after which work counts as stuck; twice what a silent store takes to be given up by its
    own time limits (docs/operations.md)."""
    max_lost_threads: int | None = None
    """Threads that may wait for a store for nobody; None: four times the slots, and 16 at least."""

    def lost_threads(self, slots: int) -> int:
        """Threads that may be lost by a server with so many slots."""
        return max(16, 4 * slots) if self.max_lost_threads is None else self.max_lost_threads

    @property
    def policy(self) -> str:
        """How the COS batch is really chosen."""
        return self.batching if self.cos_batch is None else "fixed"

    def pace(self) -> PaceLimits:
        """What the reader of an answer must do to keep its slot."""
        return PaceLimits(
            silence=self.send_timeout, rate=self.slow_reader_rate, window=self.slow_reader_seconds
        )
