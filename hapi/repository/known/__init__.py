"""Facts of remote stores that never change there: read once, and shared by the processes of a machine."""
