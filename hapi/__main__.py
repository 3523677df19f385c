"""``python -m hapi``: the same as the ``hapi`` command."""

import sys

from hapi.cli.entry import hapi

if __name__ == "__main__":
    sys.exit(hapi())
