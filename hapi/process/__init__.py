"""What a process has from its system: memory, processors, threads, standard output."""
