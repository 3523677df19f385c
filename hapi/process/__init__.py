"""What a process has from its system: memory, threads, standard output."""
