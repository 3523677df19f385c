"""``hapi-server``: the storage tier."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hapi import __version__
from hapi.allocator import keep_freed_memory
from hapi.cli.entry import Leaving
from hapi.cli.shared.common import OneLineParser, run_command
from hapi.cli.shared.numbers import DAY, count, host_memory, seconds, size
from hapi.config.token import read_token
from hapi.errors import UsageError
from hapi.factories import search_here
from hapi.units import format_bytes

DEFAULTS_EPILOG = (
    "Started as: hapi-server --store URL. It prints 'listening on http://HOST:PORT' when it is ready."
)


_positive, _natural = count(1, 1 << 20), count(0, 1 << 20)
_threads = count(1, 1024)
_seconds, _timeout = seconds(0, DAY), seconds(1e-3, DAY)
_size, _bound = size(0), size(1)


def parser() -> argparse.ArgumentParser:
    """The command line of ``hapi-server``."""
    p = OneLineParser(
        prog="hapi-server", description="Run frozen layers beside an object store.", epilog=DEFAULTS_EPILOG
    )
    p.add_argument("--version", action="version", version=f"hapi {__version__}")
    p.add_argument(
        "--store", default=os.environ.get("HAPI_STORE"), help="URL or folder of the object store (HAPI_STORE)"
    )
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    p.add_argument(
        "--port",
        type=count(0, 65535),
        default=8099,
        help="port to listen on, 0 for any free one (default 8099)",
    )
    p.add_argument("--token-file", help="file with the bearer token that clients must send (or HAPI_TOKEN)")
    p.add_argument(
        "--tenants", metavar="FILE", help="YAML file with tenants: their tokens, weights and limits"
    )
    p.add_argument("--tls-cert", help="certificate chain (PEM)")
    p.add_argument("--tls-key", help="private key (PEM)")
    p.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N; several with commas (default auto)"
    )
    p.add_argument("--threads", type=_threads, help="CPU threads of one forward pass")
    p.add_argument(
        "--decode-threads", type=_threads, default=1, help="threads that decode a COS batch (default 1)"
    )
    p.add_argument(
        "--decode-processes",
        type=count(0, 256),
        default=0,
        metavar="N",
        help="processes that decode: for small images (a few KB), where threads do not help; 0.35 GB each (default 0)",
    )
    _add_batching(p)
    _add_capacity(p)
    p.add_argument(
        "--no-model-reuse", action="store_true", help="load the layers for every request, as the paper does"
    )
    p.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:FACTORY",
        help="a model factory that clients may name, or PACKAGE.MODULE for all in it; may be repeated",
    )
    _add_limits(p)
    _add_connections(p)
    p.add_argument(
        "--drain-seconds", type=_seconds, default=30.0, help="time for running requests after SIGTERM"
    )
    p.add_argument(
        "--scrub-rate",
        type=size(0, expected="bytes a second, such as 4MiB"),
        default=0,
        metavar="SIZE",
        help="bytes per second of all data sets and models read in the background to find damage (default 0: none)",
    )
    p.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    p.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input closes")
    return p


def _add_capacity(p: argparse.ArgumentParser) -> None:
    """Requests at a time, and what is kept for later ones."""
    p.add_argument(
        "--max-running",
        type=count(1, 4096),
        default=4,
        help="requests worked on at a time, per device (default 4)",
    )
    p.add_argument(
        "--max-queued", type=_natural, default=128, help="requests that may wait; then 429 (default 128)"
    )
    p.add_argument(
        "--model-cache", type=_size, default="4GiB", help="bytes of resident frozen layers (default 4GiB)"
    )
    p.add_argument(
        "--chunk-cache",
        type=size(0, host_memory(), f"0 to this machine's memory, {format_bytes(host_memory())}"),
        help="bytes of chunks of small samples kept (default 64MiB, for a remote store 360MiB; 0: none)",
    )


def _add_batching(p: argparse.ArgumentParser) -> None:
    """How many samples go through the layers at a time."""
    how = p.add_mutually_exclusive_group()
    how.add_argument(
        "--batching",
        choices=("fixed", "adaptive", "auto"),
        default="auto",
        help="the COS batch: 16 as in the paper, what fits the memory, or what is fastest (default auto)",
    )
    how.add_argument(
        "--cos-batch", type=_positive, metavar="N", help="always N samples per forward pass and frame"
    )
    p.add_argument(
        "--device-memory",
        type=_bound,
        metavar="SIZE",
        help="bytes of each device for weights and forward passes (default: 90%% of a free GPU, half of the host's)",
    )
    p.add_argument(
        "--host-memory",
        type=_bound,
        metavar="SIZE",
        help="bytes of the server's own memory for what requests read, decode and send (default: half of what is free "
        "beside --device-memory of a CPU and --chunk-cache)",
    )
    p.add_argument(
        "--max-image-pixels",
        type=count(1, 1 << 40),
        metavar="N",
        help="largest image that is decoded (default, and most: 89478485)",
    )
    p.add_argument(
        "--merge",
        type=_natural,
        default=0,
        metavar="SAMPLES",
        help="samples up to which passes of requests for the same layers run as one (default 0: never)",
    )


def _add_limits(p: argparse.ArgumentParser) -> None:
    """What one request may take of the machine."""
    for flag, default, what in (
        ("--max-model-bytes", "8GiB", "largest model built from the zoo for a request"),
        ("--max-layer-bytes", "1GiB", "a COS batch's data at any layer; larger COS batches are cut"),
        ("--max-frame-bytes", "256MiB", "a COS batch's inputs or outputs; larger COS batches are cut"),
        ("--max-response-bytes", "16GiB", "largest answer to one request"),
    ):
        p.add_argument(flag, type=_bound, default=default, metavar="SIZE", help=f"{what} (default {default})")
    for flag, usual, what in (
        ("--max-request-seconds", 600.0, "a request's longest wait, and its longest time in all"),
        ("--send-timeout", 60.0, "seconds after which a client that takes nothing is dropped"),
        ("--slow-reader-seconds", 30.0, "seconds over which --slow-reader-rate is measured"),
        ("--stuck-seconds", 60.0, "seconds without a step after which work counts as stuck, and is given up"),
    ):
        p.add_argument(
            flag, type=_timeout, default=usual, metavar="SECONDS", help=f"{what} (default {usual:g})"
        )
    p.add_argument(
        "--max-lost-threads",
        type=_natural,
        metavar="N",
        help="threads that may wait for a store that does not answer, given up (default 4 per slot, at least 16)",
    )
    p.add_argument(
        "--slow-reader-rate",
        type=_size,
        default="1KiB",
        metavar="SIZE",
        help="bytes per second that a client must take while others wait for a slot or memory; 0: any (default 1KiB)",
    )


def _add_connections(p: argparse.ArgumentParser) -> None:
    """Who may connect, and how often."""
    p.add_argument(
        "--max-connections",
        type=_positive,
        metavar="N",
        help="connections in all (default: what the limit of open files allows, up to 4096)",
    )
    p.add_argument(
        "--max-connections-per-address",
        type=_positive,
        metavar="N",
        help="connections from one address; behind a proxy all have its address (default: half of all)",
    )
    p.add_argument(
        "--tell-store",
        action="store_true",
        help="errors tell clients where the store lies and what is in it: for a store's owner alone",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``hapi-server``; returns the exit code."""
    return run_command("hapi-server", lambda: _run(parser().parse_args(argv)), goes_on=True)


def _run(args: argparse.Namespace) -> int:
    with Leaving("hapi-server"):
        from hapi.server.http.tenants import read_tenants
        from hapi.server.lifecycle.run import ListenSettings, run_server
        from hapi.server.settings import ServerSettings

    if not args.store:
        raise UsageError("--store is missing: give the URL or folder of the object store (or set HAPI_STORE)")
    if args.exit_with_stdin and sys.stdin is None:  # Python's way to say that it was closed at the start
        raise UsageError("--exit-with-stdin: standard input is closed already")
    keep_freed_memory()
    if args.allow_model:
        search_here()
    settings = ServerSettings(
        store=args.store,
        batching=args.batching,
        cos_batch=args.cos_batch,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        max_image_pixels=args.max_image_pixels,
        merge=args.merge,
        max_running=args.max_running,
        max_queued=args.max_queued,
        model_cache_bytes=args.model_cache,
        chunk_cache_bytes=args.chunk_cache,
        model_reuse=not args.no_model_reuse,
        device=args.device,
        threads=args.threads,
        decode_threads=args.decode_threads,
        decode_processes=args.decode_processes,
        allow_models=tuple(args.allow_model),
        drain_seconds=args.drain_seconds,
        scrub_rate=args.scrub_rate,
        max_model_bytes=args.max_model_bytes,
        max_layer_bytes=args.max_layer_bytes,
        max_frame_bytes=args.max_frame_bytes,
        max_response_bytes=args.max_response_bytes,
        max_request_seconds=args.max_request_seconds,
        send_timeout=args.send_timeout,
        slow_reader_rate=args.slow_reader_rate,
        slow_reader_seconds=args.slow_reader_seconds,
        max_connections=args.max_connections,
        max_connections_per_address=args.max_connections_per_address,
        tell_store=args.tell_store,
        stuck_seconds=args.stuck_seconds,
        max_lost_threads=args.max_lost_threads,
    )
    listen = ListenSettings(
        host=args.host,
        port=args.port,
        tenants=read_tenants(args.tenants, read_token(args.token_file)),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        exit_with_stdin=args.exit_with_stdin,
    )
    return run_server(settings, listen, log_level=args.log_level)


if __name__ == "__main__":
    sys.exit(main())
