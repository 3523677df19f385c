"""Functions of ``import hapi`` for addresses (STORE/NAME) and plain values; the commands call the same functions."""
