"""What every command shares: one-line errors, exit codes, and the guard around ``main``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hapi.errors import HapiError, UsageError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def run_command(program: str, body: Callable[[], int]) -> int:
    """Run ``body`` and turn what it raises into one line on stderr and an exit code.

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted. An error that is not
    a :class:`HapiError` is a defect of Hapi and keeps its traceback (also with ``HAPI_DEBUG=1``).
    """
    try:
        return body()
    except HapiError as error:
        if os.environ.get("HAPI_DEBUG"):
            raise
        print(f"{program}: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_FAILED


def read_token(token_file: str | None) -> str | None:
    """The bearer token from ``token_file``, else from ``HAPI_TOKEN``, else None."""
    if token_file is None:
        return os.environ.get("HAPI_TOKEN") or None
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {token_file}: cannot be read: {error}") from None
    if not token or any(c.isspace() for c in token):
        raise UsageError(f"--token-file {token_file}: expected one token without spaces")
    return token
