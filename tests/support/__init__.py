"""Help for the tests of every room: processes, made-up peers, small datasets."""
