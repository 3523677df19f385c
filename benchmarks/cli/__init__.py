"""The command line of the benchmarks: ``python -m benchmarks NAME``."""
