"""Data kept on a local disk, shared by processes."""
