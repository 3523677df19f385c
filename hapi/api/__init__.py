"""What ``import hapi`` offers for addresses (STORE/NAME) and plain values; the commands call the same functions."""
