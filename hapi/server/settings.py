"""Settings of an operator. Defaults say where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hapi.codecs.names import CacheCodec
from hapi.config.settings import setting
from hapi.process.free_memory import host_memory
from hapi.server.http.slow_reader import PaceLimits

MemoryFormat = Literal["contiguous", "channels-last", "auto"]
MAX_COS_BATCH = 1000
"""Samples of the largest COS batch of ``adaptive`` and ``auto`` (the earlier text's requests)."""
_COUNT = 1 << 20
_BYTES = 1 << 48
_DAY = 86400.0
_HOST_MEMORY = host_memory()


@dataclass(frozen=True, kw_only=True)
class ProviderSettings:
    """The servers that share the work of reading models; the same list for each of them."""

    providers: tuple[str, ...] = setting(
        "URL of a hapi-server over the same store, this one's too; may be repeated. Bytes of pushed models are asked "
        "from those of the list that provide them, before the store",
        default=(),
        metavar="URL",
    )
    provider_replicas: int = setting(
        "servers that provide the same bytes; the further ones for when the first is away",
        default=2,
        low=1,
        high=1024,
        unit="count",
    )
    advertise: str | None = setting(
        "this server's own URL in the list of --providers; without it this one provides nothing to the others",
        default=None,
        metavar="URL",
    )
    provider_memory: int = setting(
        "most bytes of what this server provides that are kept in memory, beside --host-memory; of a local store none "
        "are, as the kernel keeps its files",
        default=1 << 30,
        low=0,
        high=_HOST_MEMORY,
        unit="bytes",
    )
    provider_ca: str | None = setting(
        "certificate authority (PEM) to trust for https servers of --providers",
        default=None,
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(ProviderSettings):
    """Settings of serving requests: their limits, and the state kept between them."""

    store: str = setting("URL or folder of the object store", env="HAPI_STORE", metavar="STORE")
    device: str = setting(
        "auto (CUDA when there is one), cpu, cuda or cuda:N; several with commas",
        default="auto",
        metavar="DEVICE",
    )
    threads: int | None = setting("CPU threads of one forward pass", default=None, low=1, high=1024)
    decode_threads: int = setting(
        "threads that decode a COS batch, or a process's part of it", default=1, low=1, high=1024
    )
    decode_processes: int = setting(
        "processes that decode: for small images (a few KB), where threads do not help; 0.35 GB each",
        default=0,
        low=0,
        high=256,
    )
    batching: Literal["fixed", "adaptive", "auto"] = setting(
        "the COS batch: 16 as in the paper, the largest that fits, or the fastest", default="auto"
    )
    cos_batch: int | None = setting(
        "always N samples per forward pass and frame, instead of --batching",
        default=None,
        low=1,
        high=_COUNT,
        unit="count",
    )
    min_cos_batch: int = setting(
        "smallest COS batch that a request begins with: where memory has no room for it, the request waits",
        default=1,
        low=1,
        high=_COUNT,
        unit="count",
    )
    device_memory: int | None = setting(
        "memory of each device for weights and forward passes (default: 90% of a free GPU, half of the host's)",
        default=None,
        low=1,
        high=_BYTES,
        unit="bytes",
    )
    host_memory: int | None = setting(
        "the server's own memory for reading, decoding and sending (default: half of what is free beside "
        "--device-memory of a CPU and --chunk-cache)",
        default=None,
        low=1,
        high=_BYTES,
        unit="bytes",
    )
    max_image_pixels: int | None = setting(
        "largest image that is decoded (default, and most: 89478485)",
        default=None,
        low=1,
        high=1 << 40,
        unit="count",
    )
    tf32: bool = setting(
        "let a GPU round the inputs of float32 products to 10 bits: faster, and not exact", default=False
    )
    memory_format: MemoryFormat = setting(
        "in which layers compute: contiguous, channels-last (convolutions 1.1 to 1.2 times as fast on a CPU; the last "
        "bits differ), or auto: whichever is faster when they are loaded",
        default="contiguous",
    )
    merge: int = setting(
        "samples up to which passes of requests for the same layers run as one; 0: never",
        default=0,
        low=0,
        high=_COUNT,
        unit="count",
    )
    max_running: int = setting(
        "requests worked on at a time, per device (HAPI, section 5.1), and one more of a tenant that asks rarely",
        default=4,
        low=1,
        high=4096,
        unit="count",
    )
    max_queued: int = setting(
        "requests that may wait; then 429 with Retry-After", default=128, low=0, high=_COUNT, unit="count"
    )
    model_cache: int = setting(
        "resident frozen layers that are kept for later requests",
        default=4 << 30,
        low=0,
        high=_BYTES,
        unit="bytes",
    )
    model_reuse: bool = setting(
        "keep frozen layers between requests; the paper loads them for each (section 5.1)", default=True
    )
    chunk_cache: int | None = setting(
        "chunks of small samples kept for all datasets (default: 64MiB, for a remote store 360MiB); 0: none",
        default=None,
        low=0,
        high=_HOST_MEMORY,
        unit="bytes",
    )
    share_memory: int | None = setting(
        "features kept in memory for some minutes, for requests of any job that want the same ones (default: a "
        "sixteenth of --host-memory, at most 256MiB); 0: each request computes its own",
        default=None,
        low=0,
        high=_HOST_MEMORY,
        unit="bytes",
    )
    cache_dir: str | None = setting(
        "folder on a local disk where extracted features are kept, for all jobs and tenants, across restarts; servers "
        "of one machine may share it (default: none are kept)",
        default=None,
        metavar="DIR",
    )
    cache_size: int | None = setting(
        "most bytes of --cache-dir (default: half of what is free or in it, at most 100 GB)",
        default=None,
        low=1 << 20,
        high=_BYTES,
        unit="bytes",
    )
    cache_codec: CacheCodec = setting(
        "encoding of features in --cache-dir, all exact: none, zeros, planes, both, or auto: the one that pays, if "
        "any, by the disk's measured rates",
        default="auto",
    )
    cache_memory: int = setting(
        "most bytes of --cache-dir's features, of all models and datasets, in memory too, beside --host-memory",
        default=0,
        low=0,
        high=_HOST_MEMORY,
        unit="bytes",
    )
    allow_model: tuple[str, ...] = setting(
        "a model factory that clients may name, or PACKAGE.MODULE for all in it; may be repeated",
        default=(),
        metavar="PACKAGE.MODULE:FACTORY",
    )
    max_model_bytes: int = setting(
        "largest model built from the zoo for a request; a pushed one is read layer by layer instead",
        default=8 << 30,
        low=1,
        high=_BYTES,
        unit="bytes",
    )
    max_layer_bytes: int = setting(
        "a COS batch's data at any layer; larger COS batches are cut (VGG19 at 224: 83 samples)",
        default=1 << 30,
        low=1,
        high=_BYTES,
        unit="bytes",
    )
    max_frame_bytes: int = setting(
        "a COS batch's inputs or outputs; larger COS batches are cut",
        default=256 << 20,
        low=1,
        high=_BYTES,
        unit="bytes",
    )
    max_response_bytes: int = setting(
        "largest answer to one request", default=16 << 30, low=1, high=_BYTES, unit="bytes"
    )
    max_request_seconds: float = setting(
        "a request's longest wait, and its longest time in all",
        default=600.0,
        low=1e-3,
        high=_DAY,
        unit="duration",
    )
    send_timeout: float = setting(
        "silence after which a client that takes nothing is dropped",
        default=60.0,
        low=1e-3,
        high=_DAY,
        unit="duration",
    )
    slow_reader_rate: int = setting(
        "bytes per second that a client must take while others wait for a slot or memory; 0: any (ten requests that "
        "share 1 Mbit/s get 12,500 each)",
        default=1024,
        low=0,
        high=_BYTES,
        unit="bytes",
    )
    slow_reader_seconds: float = setting(
        "time over which --slow-reader-rate is measured", default=30.0, low=1e-3, high=_DAY, unit="duration"
    )
    stuck_seconds: float = setting(
        "time without a step after which work counts as stuck, and is given up; twice what a silent store takes",
        default=60.0,
        low=1e-3,
        high=_DAY,
        unit="duration",
    )
    max_lost_threads: int | None = setting(
        "threads that may wait for a store that does not answer, given up (default: 4 per slot, at least 16)",
        default=None,
        low=0,
        high=_COUNT,
        unit="count",
    )
    max_connections: int | None = setting(
        "connections in all (default: what the limit of open files allows, up to 4096)",
        default=None,
        low=1,
        high=_COUNT,
        unit="count",
    )
    max_connections_per_address: int | None = setting(
        "connections from one address; behind a proxy all have its address (default: half of all)",
        default=None,
        low=1,
        high=_COUNT,
        unit="count",
    )
    lame_duck: float = setting(
        "time after SIGTERM in which /readyz says 503 and requests are still taken: balancers look elsewhere; then the "
        "port closes and the drain begins. 0: the drain begins at once, and the port stays open in it",
        default=0.0,
        low=0,
        high=_DAY,
        unit="duration",
    )
    drain_seconds: float = setting(
        "time for running requests after SIGTERM and --lame-duck",
        default=30.0,
        low=0,
        high=_DAY,
        unit="duration",
    )
    scrub_rate: int = setting(
        "bytes per second of all datasets and models read in the background to find damage; 0: none",
        default=0,
        low=0,
        high=_BYTES,
        unit="bytes",
    )
    tell_store: bool = setting(
        "errors tell clients where the store lies and what is in it: for a store's owner alone", default=False
    )

    def lost_threads(self, slots: int) -> int:
        """Threads that may be lost by a server with so many slots."""
        return max(16, 4 * slots) if self.max_lost_threads is None else self.max_lost_threads

    @property
    def policy(self) -> str:
        """Real choice of the COS batch."""
        return self.batching if self.cos_batch is None else "fixed"

    @property
    def arithmetic(self) -> dict[str, str]:
        """Settings that change features, where they are not the defaults; see :mod:`hapi.cache.code_version`."""
        known = (("tf32", self.tf32, False), ("memory_format", self.memory_format, "contiguous"))
        return {name: str(value) for name, value, default in known if value != default}

    def pace_limits(self) -> PaceLimits:
        """Requirements on the reader of an answer to keep its slot."""
        return PaceLimits(
            silence=self.send_timeout, rate=self.slow_reader_rate, window=self.slow_reader_seconds
        )


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Address and tenants of a server."""

    host: str = setting("address to listen on", default="127.0.0.1", metavar="ADDRESS")
    port: int = setting("port to listen on; 0: any free one", default=8099, low=0, high=65535)
    token_file: str | None = setting(
        "file with the bearer token that clients must send (or HAPI_TOKEN)",
        default=None,
        metavar="FILE",
    )
    tenants: str | None = setting(
        "YAML file with tenants: their tokens, weights and limits", default=None, metavar="FILE"
    )
    accounts: str | None = setting(
        "folder for a CSV file a day with the use of each tenant; servers may share it",
        default=None,
        metavar="DIR",
    )
    tls_cert: str | None = setting("certificate chain (PEM)", default=None, metavar="FILE")
    tls_key: str | None = setting("private key (PEM)", default=None, metavar="FILE")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "least level that is logged", default="info"
    )
    exit_with_stdin: bool = setting(
        "stop when standard input closes, that is, when the process that started this one is gone",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ListenSettings, ServiceSettings):
    """Settings of one server process: the flags of ``hapi-server``, which describes each of them.

    >>> import hapi
    >>> hapi.ServerSettings(store="s3://bucket/hapi", device="cuda:0,cuda:1").batching
    'auto'
    """
