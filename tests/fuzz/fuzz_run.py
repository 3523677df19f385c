"""Fuzz one target for a while: ``python tests/fuzz/fuzz_run.py TARGET --seconds N [--findings DIR] [--corpus DIR]``

With atheris (coverage-guided, libFuzzer), where it can be imported; else, or with ``--mutate``, by random mutations of
the seeds, which says so. The exit code is 0 when nothing was found; else the input is in the findings' folder.
"""

from __future__ import annotations

import argparse
import importlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

MEMORY = 1 << 30
"""Bytes of address space that inputs may take beside what the process has."""
SECONDS = 20
"""Longest time for one input, on a machine with other work."""
MAX_BYTES = 1 << 14
"""Longest input."""
FOUND = 77
"""Exit code when an input was found; libFuzzer's."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="fuzz_run.py", description="Fuzz one target.")
    p.add_argument("target", help="one of those in tests/fuzz/fuzz_targets.py")
    p.add_argument("--seconds", type=float, default=60.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument(
        "--findings", type=Path, default=Path("findings"), help="where inputs that break a target are kept"
    )
    p.add_argument(
        "--corpus", type=Path, help="where inputs that found something new are kept, for the next run"
    )
    p.add_argument("--mutate", action="store_true", help="without atheris")
    return p.parse_args()


def bounded() -> None:
    """No more memory for this process than it has, and :data:`MEMORY`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def guided(args: argparse.Namespace) -> None:
    """Fuzz with atheris; does not return."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(
        include=[
            "hapi.wire",
            "hapi.store",
            "hapi.data",
            "hapi.ingest",
            "hapi.repository.manifest",
            "hapi.errors",
        ]
    ):
        targets = importlib.import_module("fuzz_targets")
    corpus = args.corpus or Path(tempfile.mkdtemp(prefix="hapi-fuzz-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(targets.seeds_of(args.target)):
        (corpus / f"seed-{number:02d}").write_bytes(data)
        targets.attempt(args.target, data)
    bounded()
    options = [
        f"-max_total_time={max(1, round(args.seconds))}", f"-seed={args.seed}", f"-timeout={SECONDS}",
        f"-max_len={MAX_BYTES}", f"-artifact_prefix={args.findings}/", "-rss_limit_mb=0", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: targets.attempt(args.target, data))
    atheris.Fuzz()


def mutated(args: argparse.Namespace) -> int:
    """Fuzz by random mutations."""
    targets = importlib.import_module("fuzz_targets")
    print("without atheris: random mutations, not guided by coverage", flush=True)
    seeds, dice, runs = targets.seeds_of(args.target), random.Random(args.seed), 0
    for data in seeds:
        targets.attempt(args.target, data)
    bounded()
    signal.signal(signal.SIGALRM, _too_long)
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        data, runs = mutation(seeds, dice), runs + 1
        signal.alarm(SECONDS)
        try:
            targets.attempt(args.target, data)
        except BaseException:
            traceback.print_exc()
            (args.findings / f"crash-{args.target}").write_bytes(data)
            return FOUND
        finally:
            signal.alarm(0)
    print(f"{runs} inputs", flush=True)
    return 0


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"one input takes more than {SECONDS} s")


def mutation(seeds: list[bytes], dice: random.Random) -> bytes:
    """One of the seeds with a few changes."""
    data = bytearray(dice.choice(seeds))
    changes: list[Callable[[bytearray, int], None]] = [
        lambda d, at: d.__setitem__(at, dice.randrange(256)),
        lambda d, at: d.__setitem__(at, d[at] ^ 1 << dice.randrange(8)),
        lambda d, at: d.insert(at, dice.randrange(256)),
        lambda d, at: d.__delitem__(slice(at, at + dice.randrange(1, 64))),
        lambda d, at: d.__setitem__(slice(at, at), d[at : at + dice.randrange(1, 64)]),
        lambda d, at: d.__setitem__(slice(at, at + 8), dice.choice(INTERESTING)),
        lambda d, at: d.__setitem__(slice(at, at + 1), dice.choice(TOKENS)),
        lambda d, at: d.__setitem__(slice(at, None), dice.choice(seeds)[at:]),
    ]
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        if data:
            dice.choice(changes)(data, dice.randrange(len(data)))
    return bytes(data[:MAX_BYTES])


INTERESTING = [
    n.to_bytes(8, order)
    for n in (0, 1, 0x7F, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
    for order in ("little", "big")
]  # fmt: skip
TOKENS = [b"null", b"true", b"-1", b"1e999", b"NaN", b"Infinity", b"9" * 30, b"{}", b"[]", b'""', b"\\ud800", b"1.0",
          b'"a":1,', b"[[[[[[", b"\\u0000", b"\\u001b", b"[" * 9000]  # fmt: skip
"""What JSON may have where something else is expected."""


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    args = arguments()
    args.findings.mkdir(parents=True, exist_ok=True)
    try:
        found = not args.mutate and importlib.import_module("atheris") is not None
    except ImportError:
        found = False
    if found:
        guided(args)
    return mutated(args)


if __name__ == "__main__":
    sys.exit(main())
