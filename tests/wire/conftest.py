"""What several tests of the wire need."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.certificates import self_signed


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key in one file."""
    cert, key = self_signed(tmp_path_factory.mktemp("tls"))
    both = cert.with_name("both.pem")
    both.write_text(key.read_text() + cert.read_text())
    return both
