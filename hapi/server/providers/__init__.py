"""Several servers over one store: each content has its provider among them, which the others ask first."""
