"""A hapi-server whose requests wait for each other's passes however long this machine stands still meanwhile."""

from __future__ import annotations

import sys

from hapi.cli.server import main
from hapi.server.sharing import claims

if __name__ == "__main__":
    claims.PATIENCE_SECONDS = 3600.0
    sys.exit(main())
