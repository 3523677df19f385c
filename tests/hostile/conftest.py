"""Tests against real processes that are given what nobody should give them: floods, hung reads, full disks, damaged
files, lying peers. Each is ended by the test that started it."""
